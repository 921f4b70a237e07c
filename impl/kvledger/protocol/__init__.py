"""The ground floor: the part that `spec/MooncakeStore.tla` specifies. Pure Python, sans I/O, threads and clocks."""

from kvledger.protocol.breaker import Breaker
from kvledger.protocol.jobs import RANK_LIFE, Job, Kind, Life, Report, Result
from kvledger.protocol.ledger import Decline, Ledger, LedgerSnapshot, Settled
from kvledger.protocol.pins import PinSnapshot, PinTable
from kvledger.protocol.rank import RankLedger, RankSnapshot
from kvledger.protocol.tracker import LOAD_LIFE, Load, Tracker

__all__ = [
    "LOAD_LIFE",
    "RANK_LIFE",
    "Breaker",
    "Decline",
    "Job",
    "Kind",
    "Ledger",
    "LedgerSnapshot",
    "Life",
    "Load",
    "PinSnapshot",
    "PinTable",
    "RankLedger",
    "RankSnapshot",
    "Report",
    "Result",
    "Settled",
    "Tracker",
]
