"""The watch over a launch's copies fails at each that a GPU would wait for, and at no other."""

from collections.abc import Callable, Iterator

import pytest
import torch

from chairlift.device import bring, send
from tests.support.meta_device import META, DeviceWatch

ON_HOST, ON_DEVICE = torch.arange(6.0).view(2, 3), torch.empty(2, 3, device=META)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As in a launch."""
    with torch.inference_mode():
        yield


def test_pinned_copies_and_those_to_the_host_pass_and_are_counted() -> None:
    with DeviceWatch(told=7) as watch:
        sent = send(ON_HOST, META)
        assert bring(sent * 2).tolist() == [[7.0] * 3] * 2
    assert (watch.num_sent, watch.num_brought) == (1, 1)


PLANTED: dict[str, tuple[Callable[[], object], str]] = {
    "sent, blocking": (lambda: ON_HOST.pin_memory().to(META), "that blocks"),
    "brought, blocking": (lambda: ON_DEVICE.cpu(), "that blocks"),
    "not pinned": (lambda: ON_HOST.to(META, non_blocking=True), "not pinned"),
    "mixed": (lambda: ON_DEVICE + ON_HOST, "host and of the device"),
    "mixed, in a list": (lambda: torch.cat([ON_DEVICE, ON_HOST]), "host and of the device"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_copy_fails(name: str) -> None:
    plant, message = PLANTED[name]
    with DeviceWatch(), pytest.raises(AssertionError, match=message):
        plant()


@pytest.mark.parametrize("copy", [lambda: send(ON_HOST, META), lambda: bring(ON_DEVICE)], ids=["sent", "brought"])
def test_any_copy_fails_while_a_graph_is_recorded(copy: Callable[[], object]) -> None:
    with DeviceWatch() as watch, watch.recording(), pytest.raises(AssertionError, match="a graph is recorded"):
        copy()


@pytest.mark.parametrize(
    "read",
    [torch.Tensor.item, bool, float, torch.Tensor.tolist, torch.Tensor.nonzero],
    ids=["item", "bool", "float", "tolist", "nonzero"],
)
def test_reading_a_number_on_the_host_fails(read: Callable[[torch.Tensor], object]) -> None:
    with DeviceWatch(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
        read(ON_DEVICE.sum())
