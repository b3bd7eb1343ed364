"""A device's queue: in order, on a thread of its own, errors told once."""

import threading
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

from torpor import config
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.execute.queue import DeviceQueue, queue_of, queues
from torpor.ir.types import TensorType
from torpor.transactions import jobs
from torpor.transactions.jobs import JOB_BYTES, Job

DEVICE = BackendDevice(BackendDeviceType("cpu"), 0)
TYPE = TensorType.contiguous((), torch.float32, torch.device("cpu"))
PATIENCE = 30


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def either(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeviceQueue]:
    """A queue with a thread, and one that runs jobs where they are submitted."""
    monkeypatch.setattr(config, "async_queue", request.param)
    made = DeviceQueue(DEVICE)
    yield made
    made.stop()


@pytest.fixture
def threaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceQueue]:
    monkeypatch.setattr(config, "async_queue", True)
    made = DeviceQueue(DEVICE)
    yield made
    made.stop()


def failing(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_jobs_run_in_the_order_of_submission(either: DeviceQueue) -> None:
    ran: list[int] = []
    for number in range(30):
        either.submit(Job(lambda number=number: ran.append(number), []))
    either.wait()
    assert ran == list(range(30))


def test_jobs_run_on_a_thread_of_torpors_own(threaded: DeviceQueue) -> None:
    names: list[str] = []
    threaded.submit(Job(lambda: names.append(threading.current_thread().name), []))
    threaded.wait()
    assert names == ["torpor-cpu:0"]


def test_a_job_may_have_to_run_where_it_is_submitted_after_all_before_it(
    threaded: DeviceQueue,
) -> None:
    ran: list[tuple[str, threading.Thread]] = []
    threaded.submit(Job(lambda: ran.append(("first", threading.current_thread())), []))
    threaded.submit(Job(lambda: ran.append(("here", threading.current_thread())), [], here=True))
    assert [name for name, _ in ran] == ["first", "here"]
    assert ran[1][1] is threading.current_thread() is not ran[0][1]


def test_without_the_asynchronous_queue_the_caller_runs_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config, "async_queue", False)
    where: list[threading.Thread] = []
    DeviceQueue(DEVICE).submit(Job(lambda: where.append(threading.current_thread()), []))
    assert where == [threading.current_thread()]


LARGE = TensorType.of((JOB_BYTES,), (1,), torch.float32, torch.device("cpu"))


def is_held_up(queue: DeviceQueue, gate: threading.Event, kept: BackendData) -> bool:
    """Whoever submits a job that keeps `kept` has to wait until `gate` opens."""
    submitted = threading.Event()

    def submit() -> None:
        queue.submit(Job(lambda: None, [], [kept]))
        submitted.set()

    thread = threading.Thread(target=submit)
    thread.start()
    waited = not submitted.wait(0.05)
    gate.set()
    thread.join(PATIENCE)
    assert submitted.is_set()
    return waited


@pytest.mark.parametrize("shared", [False, True])
def test_jobs_that_keep_too_much_alive_hold_up_whoever_submits_more(
    threaded: DeviceQueue, monkeypatch: pytest.MonkeyPatch, shared: bool
) -> None:
    monkeypatch.setattr(config, "queue_bytes", 10 * JOB_BYTES)
    gate, data = threading.Event(), BackendData(DEVICE, LARGE)  # four times JOB_BYTES
    threaded.submit(Job(lambda: gate.wait(PATIENCE) and None, [], [data]))
    threaded.submit(Job(lambda: None, [], [data]))
    more = data if shared else BackendData(DEVICE, LARGE)
    assert is_held_up(threaded, gate, more) is not shared
    threaded.wait()
    assert threaded.budget.bytes == 0
    assert not threaded.budget.jobs


def test_a_job_larger_than_the_budget_runs_when_no_other_does(
    threaded: DeviceQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "queue_bytes", 1)
    ran: list[int] = []
    for number in range(3):
        kept = [BackendData(DEVICE, LARGE)]
        threaded.submit(Job(lambda number=number: ran.append(number), [], kept))
    threaded.wait()
    assert ran == [0, 1, 2]


def test_a_result_is_there_when_its_job_has_run(either: DeviceQueue) -> None:
    result = BackendData(DEVICE, TYPE)
    filled = BackendData(DEVICE, TYPE, torch.ones(()))
    either.submit(Job(lambda: result.assign(filled), [result]))
    assert result.wait() is result
    assert result.has_value


def test_an_error_reaches_every_result_and_the_queue_goes_on(either: DeviceQueue) -> None:
    results = [BackendData(DEVICE, TYPE) for _ in range(2)]
    error = ValueError("broken")
    either.submit(Job(failing(error), results))
    after: list[int] = []
    either.submit(Job(lambda: after.append(1), []))
    either.wait()
    assert [result.error for result in results] == [error, error]
    assert after == [1]


def test_an_error_nobody_was_told_of_is_raised_once(either: DeviceQueue) -> None:
    either.submit(Job(failing(ValueError("first")), [BackendData(DEVICE, TYPE)]))
    either.submit(Job(failing(ValueError("second")), [BackendData(DEVICE, TYPE)]))
    either.wait()
    with pytest.raises(ValueError, match="first"):
        either.raise_error()
    either.raise_error()


def test_an_error_that_a_reader_was_told_of_is_not_raised_again(either: DeviceQueue) -> None:
    result = BackendData(DEVICE, TYPE)
    either.submit(Job(failing(ValueError("broken")), [result]))
    with pytest.raises(ValueError, match="broken"):
        result.wait()
    either.wait()
    either.raise_error()


def test_an_idle_queue_keeps_nothing_of_the_last_job(either: DeviceQueue) -> None:
    buffer = torch.ones(1)
    gone = weakref.ref(buffer)
    either.submit(Job(lambda buffer=buffer: buffer.sum() and None, []))
    del buffer
    either.wait()
    assert gone() is None


def test_a_stopped_queue_has_finished_its_jobs_and_starts_again(threaded: DeviceQueue) -> None:
    ran: list[int] = []
    threaded.submit(Job(lambda: ran.append(1), []))
    threaded.stop()
    assert ran == [1]
    threaded.submit(Job(lambda: ran.append(2), []))
    threaded.wait()
    assert ran == [1, 2]


def test_kernels_use_as_many_threads_as_the_program_that_recorded_them(
    threaded: DeviceQueue,
) -> None:
    before = torch.get_num_threads()
    found: list[int] = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            threaded.submit(Job(lambda: found.append(torch.get_num_threads()), []))
        threaded.wait()
    finally:
        torch.set_num_threads(before)
    assert found == [1, 2]


def test_a_device_has_one_queue() -> None:
    device = BackendDevice(BackendDeviceType("cpu"), 7)
    assert queue_of(device) is queue_of(BackendDevice(BackendDeviceType("cpu"), 7))
    assert queues(device) == [queue_of(device)]
    assert queue_of(device) in queues()


def test_a_short_job_runs_where_it_is_submitted(threaded: DeviceQueue) -> None:
    ran: list[threading.Thread] = []
    threaded.submit(Job(lambda: ran.append(threading.current_thread()), [], usual=0.001))
    assert ran == [threading.current_thread()]


def test_an_interrupt_of_a_job_that_runs_here_is_raised_here(threaded: DeviceQueue) -> None:
    result = BackendData(DEVICE, TYPE)
    with pytest.raises(KeyboardInterrupt):
        threaded.submit(Job(failing(KeyboardInterrupt()), [result], here=True))
    with pytest.raises(KeyboardInterrupt):
        result.wait()
    threaded.raise_error()  # was told
    ran: list[int] = []
    threaded.submit(Job(lambda: ran.append(1), [], here=True))
    assert ran == [1]


def test_a_job_whose_thread_is_interrupted_before_its_turn_runs_all_the_same(
    threaded: DeviceQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, result = threading.Event(), BackendData(DEVICE, TYPE)
    threaded.submit(Job(lambda: gate.wait(PATIENCE) and None, []))
    monkeypatch.setattr(threaded, "_wait_for_turn", failing_at(KeyboardInterrupt()))
    filled = BackendData(DEVICE, TYPE, torch.ones(()))
    with pytest.raises(KeyboardInterrupt):
        threaded.submit(Job(lambda: result.assign(filled), [result], here=True))
    monkeypatch.undo()
    gate.set()
    assert result.wait().has_value


def failing_at(error: BaseException) -> Callable[[Job], None]:
    def wait(job: Job) -> None:
        raise error

    return wait


def test_wherever_a_job_runs_it_makes_no_inference_tensors(either: DeviceQueue) -> None:
    made: list[torch.Tensor] = []
    with torch.inference_mode():
        either.submit(Job(lambda: made.append(torch.ones(2)), []))
    either.wait()
    assert not made[0].is_inference()


def test_a_short_job_waits_its_turn(threaded: DeviceQueue) -> None:
    gate, order = threading.Event(), []

    def first() -> None:
        assert gate.wait(PATIENCE)
        order.append("first")

    threaded.submit(Job(first, []))
    threaded.submit(Job(lambda: order.append("second"), [], usual=0.001))
    assert order == []
    gate.set()
    threaded.wait()
    assert order == ["first", "second"]


@pytest.fixture
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "cores", lambda: 1024)


def test_a_job_whose_kernels_use_every_core_runs_where_it_is_submitted(
    threaded: DeviceQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "cores", torch.get_num_threads)
    ran: list[threading.Thread] = []
    threaded.submit(Job(lambda: ran.append(threading.current_thread()), [], usual=1.0))
    assert ran == [threading.current_thread()]


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("usual", [None, 1.0])
def test_any_other_job_runs_on_the_queue(threaded: DeviceQueue, usual: float | None) -> None:
    ran: list[threading.Thread] = []
    threaded.submit(Job(lambda: ran.append(threading.current_thread()), [], usual=usual))
    threaded.wait()
    assert ran == [threaded.thread]


@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("threads", [1, 2])
def test_a_short_job_of_several_threads_ends_the_queues_thread(
    threaded: DeviceQueue, threads: int
) -> None:
    """OpenMP keeps threads for every thread that used it, and lets all of them sleep early."""
    ran: list[threading.Thread] = []

    def note() -> None:
        ran.append(threading.current_thread())

    for usual in (1.0, 0.001, 1.0):
        job = Job(note, [], usual=usual)
        job.threads = threads
        threaded.submit(job)
        threaded.wait()
    torch.set_num_threads(torch.get_num_threads())  # what new threads start with
    here = threading.main_thread()
    assert [thread is here for thread in ran] == [False, True, False]
    assert ran[0].is_alive() == (threads == 1)
    assert ran[2].is_alive()
