"""The processes that train together, as torchrun starts them. With a single process every operation is a
no-op that returns its input.

Each rank takes a share of the groups: rank r of W collects the groups at positions r, r + W, … and learns
from them. Every number that a decision depends on (means of advantages, denominators, gradients, metrics) is
summed over the ranks first, so all ranks decide alike, and as a single process would.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, overload

from pydantic import Field

from agent_peft.config import Config
from agent_peft.lazy_torch import Tensor, torch
from agent_peft.printable import cause_of
from agent_peft.seeding import derive
from agent_peft.types import AgentPeftError, InfrastructureError, TrustError

T = TypeVar("T")
EXTREMES = ("_min", "_max")  # ends of the names of numbers that are not summed
TORCHRUN_COMMAND = "torchrun --nproc_per_node=N -m agent_peft train CONFIG"


class RanksConfig(Config):
    """How several processes train together. torchrun decides how many there are. No key here changes the
    result of training.
    """

    timeout: float = Field(
        default=1800.0, gt=0, description="seconds that a rank waits for the others before the run fails"
    )
    allow_other_number: bool = Field(
        default=False,
        description="resume a checkpoint of another number of ranks; results are equal up to rounding",
    )


@dataclass(frozen=True)
class Ranks:
    """This process among ``world_size`` processes. Every method that communicates is collective: all ranks
    must call it, in the same order.

    >>> alone = Ranks()
    >>> alone.share(["a", "b", "c"]), alone.gather_objects({"x": 1}), alone.broadcast(lambda: 7)
    (['a', 'b', 'c'], [{'x': 1}], 7)
    >>> Ranks(rank=1, world_size=2).share(["a", "b", "c"])
    ['b']
    """

    rank: int = 0
    world_size: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only one that writes files and prints."""
        return self.rank == 0

    @overload
    def share(self, items: range) -> range: ...
    @overload
    def share(self, items: Sequence[T]) -> Sequence[T]: ...
    def share(self, items: Any) -> Any:
        """Return this rank's items: those at positions rank, rank + world_size, …"""
        return items[self.rank :: self.world_size]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, with the same bits on each rank."""
        if self.world_size == 1:
            return tensor
        total = tensor.detach().clone()
        with collective():
            torch.distributed.all_reduce(total)
        return total

    def gather_objects(self, content: Any) -> list[Any]:
        """Return the ``content`` of every rank, ordered by rank. It must be fit for JSON and travels as JSON,
        never as pickle.
        """
        if self.world_size == 1:
            return [content]
        encoded = torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with collective():
            torch.distributed.all_gather(sizes, torch.tensor([len(encoded)]))
            longest = max(int(size) for size in sizes)
            padded = torch.cat([encoded, encoded.new_zeros(longest - len(encoded))])
            texts = [torch.empty_like(padded) for _ in sizes]
            torch.distributed.all_gather(texts, padded)
        return [
            json.loads(text[: int(size)].numpy().tobytes()) for text, size in zip(texts, sizes, strict=True)
        ]

    def broadcast(self, make: Callable[[], T]) -> T:
        """Call ``make`` on rank 0 alone and return its result on every rank. It must be fit for JSON."""
        if self.world_size == 1:
            return make()
        made: T = self.gather_objects(make() if self.is_main else None)[0]
        return made

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.broadcast(lambda: None)

    def sum_named(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum named scalars, each over the ranks that have one of its name, in fp64. Those that are named
        …_min and …_max are their extremes.
        """
        if self.world_size == 1:
            return dict(sums)
        totals: dict[str, float] = {}
        for of_rank in self.gather_objects({name: float(value) for name, value in sums.items()}):
            for name, value in of_rank.items():
                totals[name] = merged(name, totals[name], value) if name in totals else value
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in totals.items()}

    def sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Sum the gradients over the ranks, in one flat fp32 vector. A parameter without a gradient on
        every rank keeps None.
        """
        if self.world_size == 1:
            return
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        flat = self.sum(torch.cat([*(gradient.float().flatten() for gradient in gradients), present]))
        *totals, counts = torch.split(flat, [*(p.numel() for p in parameters), len(present)])
        for parameter, total, count in zip(parameters, totals, counts.tolist(), strict=True):
            parameter.grad = total.view_as(parameter).to(parameter.dtype) if count else None

    def assert_equal(self, parameters: Iterable[Tensor], name: str) -> None:
        """Check that parameters have the same bits on all ranks.

        Raises:
            TrustError: they differ. The message calls them ``name``.
        """
        if self.world_size > 1 and len(set(self.gather_objects(checksum(parameters)))) > 1:
            raise TrustError(
                f"{name} differ between the ranks, so they would not train the same policy: "
                "give every rank the same model"
            )


ALONE = Ranks()


def merged(name: str, one: Any, other: Any) -> Any:
    """Two parts of a named number or scalar tensor as one: their extreme where the name ends in _min or _max,
    and their sum otherwise.

    >>> merged("ratio_max", 1.5, 1.25), merged("loss", 1.5, 1.25)
    (1.5, 2.75)
    """
    if name.endswith(EXTREMES):
        return max(one, other) if name.endswith("_max") else min(one, other)
    return one + other


def checksum(parameters: Iterable[Tensor]) -> int:
    """Return a checksum of the parameters' bits. It is cheap and exact, equal on every device, and does not
    depend on the order of elements within a parameter.

    >>> ones = torch.ones(3)
    >>> checksum([ones]) == checksum([torch.ones(3)]) != checksum([ones.nextafter(torch.tensor(2.0))])
    True
    """
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the size of an element
    sums = [p.detach().view(integers[p.element_size()]).sum(dtype=torch.int64) for p in parameters]
    return derive(0, *torch.stack(sums).tolist()) if sums else 0


@contextmanager
def join(config: RanksConfig, device: str) -> Iterator[Ranks]:
    """Join the ranks that torchrun started: with gloo on CPUs, with NCCL on GPUs, one GPU for each rank.

    Args:
        device: ``policy.device``. ``auto`` is the GPU of the rank's number where there are GPUs.

    Raises:
        InfrastructureError: other ranks did not start within the timeout, or have ended.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield ALONE
        return
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        raise AgentPeftError(
            f"WORLD_SIZE is {world_size}, but {missing[0]} is not set: start with {TORCHRUN_COMMAND}, "
            "or unset WORLD_SIZE"
        )
    rank, local_rank, local_size = (int(os.environ[name]) for name in names[:3])
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if cuda:
        if device.startswith("cuda:") and local_size > 1:
            raise AgentPeftError(
                f"policy.device: {device} is one GPU, and torchrun started {local_size} ranks here; "
                "set policy.device=auto"
            )
        if local_rank >= torch.cuda.device_count():
            have = f"this machine has {torch.cuda.device_count()} GPUs"
            raise AgentPeftError(
                f"{have}, and torchrun started {local_size} ranks on it; lower --nproc_per_node, "
                "or set policy.device=cpu"
            )
        torch.cuda.set_device(torch.device(device) if device.startswith("cuda:") else local_rank)
    with collective():
        torch.distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=config.timeout)
        )
    # After an error the process group is not destroyed: the others may wait in a collective, and the end of
    # this process ends them, too.
    ranks = Ranks(rank, world_size)
    yield ranks
    ranks.barrier()
    torch.distributed.destroy_process_group()


@contextmanager
def collective() -> Iterator[None]:
    """Run a collective operation of torch. The failure of another rank becomes an error of one line.

    Raises:
        InfrastructureError: another rank has ended, or did not answer in time.
    """
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises nothing else
        raise InfrastructureError(
            f"another rank has ended or does not answer; its own message says why ({cause_of(error)})"
        ) from error
