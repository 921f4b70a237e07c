"""The ground floor: the part that `spec/MooncakeStore.tla` specifies. Pure Python, sans I/O, threads and clocks."""

from kvledger.protocol.breaker import Breaker
from kvledger.protocol.jobs import RANK_LIFE, Job, Kind, Life, Report, Result
from kvledger.protocol.ledger import Decline, Ledger, LedgerSnapshot, Settled
from kvledger.protocol.pins import PinSnapshot, PinTable
from kvledger.protocol.rank import RankLedger, RankSnapshot
from kvledger.protocol.step import StepPlan
from kvledger.protocol.tracker import LOAD_LIFE, Load, Tracker
from kvledger.protocol.views import LedgerView, OpenJobView, RankView, TrackerView

__all__ = [
    "LOAD_LIFE",
    "RANK_LIFE",
    "Breaker",
    "Decline",
    "Job",
    "Kind",
    "Ledger",
    "LedgerSnapshot",
    "LedgerView",
    "Life",
    "Load",
    "OpenJobView",
    "PinSnapshot",
    "PinTable",
    "RankLedger",
    "RankSnapshot",
    "RankView",
    "Report",
    "Result",
    "Settled",
    "StepPlan",
    "Tracker",
    "TrackerView",
]
