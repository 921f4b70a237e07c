"""What vLLM is told at start-up, and where kvledger's log lines go."""

import logging
from contextlib import contextmanager

from kvledger.plugin import share_vllm_logging


@contextmanager
def bare_loggers():
    """kvledger's and vLLM's logger as in a process that has configured nothing."""
    ours, theirs = logging.getLogger("kvledger"), logging.getLogger("vllm")
    kept = [(logger, list(logger.handlers), logger.level) for logger in (ours, theirs, logging.getLogger())]
    for logger, _, _ in kept:
        logger.handlers, logger.level = [], logging.NOTSET
    try:
        yield ours, theirs
    finally:
        for logger, handlers, level in kept:
            logger.handlers, logger.level = handlers, level


def test_lines_appear_where_those_of_vllm_do(caplog):
    with bare_loggers() as (ours, theirs):
        theirs.addHandler(caplog.handler)
        theirs.setLevel(logging.INFO)
        share_vllm_logging()
        share_vllm_logging()
        logging.getLogger("kvledger.connector").info("seen once")
        assert caplog.messages == ["seen once"]
        assert ours.propagate


def test_a_logger_that_the_user_configured_stays_as_it_is():
    with bare_loggers() as (ours, theirs):
        theirs.addHandler(logging.NullHandler())
        ours.setLevel(logging.ERROR)
        share_vllm_logging()
        assert ours.handlers == []
        assert ours.level == logging.ERROR


def test_lines_that_the_root_logger_shows_are_not_shown_twice():
    with bare_loggers() as (ours, theirs):
        theirs.addHandler(logging.NullHandler())
        logging.getLogger().addHandler(logging.NullHandler())
        share_vllm_logging()
        assert ours.handlers == []


def test_entry_point_registers_the_class_under_its_own_name():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvledger import plugin

    plugin.register()
    plugin.register()
    found = KVConnectorFactory.get_connector_class_by_name(plugin.NAME)
    assert found.__name__ == plugin.NAME
