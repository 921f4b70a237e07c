"""Ways to corrupt a recording: each breaks one promise at one event, and names the rule that must notice.

A corruption changes the list of events (the header is number 0) and returns the number of the event at which the
recording stops being a behaviour of the model.
"""

from tests.recordings.corruptions import generations, loads, reports, stores, sync_loads
from tests.recordings.corruptions.recording import CORRUPTIONS, Events

__all__ = ["CORRUPTIONS", "Events", "generations", "loads", "reports", "stores", "sync_loads"]
