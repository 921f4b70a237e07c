"""Admissions: which request object, and which of its lives, a request id stands for."""

import pytest
from vllm import SamplingParams
from vllm.v1.request import Request

from kvledger.scheduler.admissions import Admissions


def make_request(request_id: str = "r") -> Request:
    return Request(request_id, [1, 2, 3], SamplingParams(max_tokens=1), None)


def preempt(request: Request) -> None:
    """What vLLM notes of a preemption, also of one by a reset; it lists the id as preempted only later."""
    request.num_preemptions += 1


@pytest.fixture
def request_() -> Request:
    return make_request()


@pytest.fixture
def admissions(request_) -> Admissions:
    """`request_` is admitted, and nobody else."""
    admissions = Admissions()
    assert not admissions.is_current(request_)
    admissions.begin(request_)
    return admissions


def test_an_admission_is_current_until_it_ends(admissions, request_):
    assert admissions.is_current(request_)
    assert admissions.request("r") is request_
    assert admissions.end(request_)
    assert not admissions.is_current(request_)
    assert admissions.request("r") is None
    assert len(admissions) == 0


def test_a_preemption_ends_it_when_vllm_lists_it(admissions, request_):
    preempt(request_)
    assert not admissions.is_current(request_)
    assert len(admissions) == 1
    assert admissions.end_if_preempted("r")
    assert admissions.request("r") is None
    assert not admissions.end_if_preempted("r")


def test_a_request_resumed_in_the_step_that_preempted_it_stays_although_it_is_listed_late(admissions, request_):
    preempt(request_)
    admissions.begin(request_)
    assert not admissions.end_if_preempted("r")
    assert admissions.is_current(request_)


def test_a_second_preemption_after_the_resumption_counts(admissions, request_):
    for _ in range(2):
        admissions.begin(request_)
        preempt(request_)
    assert admissions.end_if_preempted("r")


def test_another_object_with_the_same_id_is_another_admission(admissions, request_):
    """vLLM lets an id be used again while the first request's saves are still out."""
    second = make_request()
    assert not admissions.is_current(second)
    assert not admissions.end(second)
    admissions.begin(second)
    assert not admissions.is_current(request_)
    assert not admissions.end(request_)
    assert admissions.request("r") is second


def test_ids_that_nobody_admitted_have_nothing_to_end(admissions, request_):
    assert not admissions.end_if_preempted("r")
    assert not admissions.end_if_preempted("unknown")
    assert not admissions.end(make_request("unknown"))
    assert admissions.is_current(request_)


def test_a_reset_keeps_only_those_named(admissions, request_):
    other = make_request("other")
    admissions.begin(other)
    admissions.keep_only({"other", "unknown"})
    assert admissions.is_current(other)
    assert not admissions.is_current(request_)
    assert len(admissions) == 1
