"""Train a model from `transformers`, its code unmodified, on real text and on several ranks.

    torchrun --nproc-per-node 4 examples/train.py                        # a small Qwen3, dp_shard=2 x tp=2 on the CPU
    torchrun --nproc-per-node 4 examples/train.py --model qwen3_5 --tp 4
    torchrun --nproc-per-node 4 examples/train.py --folder Qwen3-0.6B    # a model that was saved before
    torchrun --nproc-per-node 4 examples/train.py --resume               # go on from the last checkpoint
    python examples/train.py                                             # the same on one rank, plain PyTorch

It ends by training the same model on the same data on one rank, without hyper_parallel, and compares the losses step by
step: parallelism must not change what is learned. The exit code is 1 if they differ.

`--out` receives `log.json`, `loss.png`, `checkpoints/` and `model/`, which `transformers` loads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from run_report import Comparison, ProgressBar, StepRecord, plot_loss, write_log
from small_models import MODELS, small_config
from text_batches import VOCAB_SIZE, TextBatches

from hyper_parallel import checkpoint

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}

# Measured on this model with the batch summed in another order, which changes nothing but the rounding.
TOLERANCE_HELP = (
    "largest allowed difference of a loss; rounding alone makes 1e-5 in 100 steps at the default learning rate, and it "
    "grows tenfold with each further hundred or so steps, sooner at a higher rate"
)


def main() -> int:
    """Train, write the results, compare; 0 if the losses are those of one rank."""
    args = parse_arguments()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    device = pick_device(args.device)
    if world_size > 1:
        dist.init_process_group(
            args.backend or BACKENDS[args.device], timeout=timedelta(seconds=args.collective_timeout)
        )
    try:
        return run(args, rank, world_size, device)
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def parse_arguments() -> argparse.Namespace:
    """The command line, checked as far as one rank can."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    here = Path(__file__).parent
    parser.add_argument("--text", type=Path, default=here / "data" / "persuasion.txt", help="any text file")
    parser.add_argument("--out", type=Path, default=Path("runs") / "train", help="folder for log, plot and checkpoints")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps, counted from the very first")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per step, over all ranks")
    parser.add_argument("--length", type=int, default=128, help="bytes per sequence")
    parser.add_argument("--lr", type=float, default=1e-3, help="AdamW's learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden-size", type=int, default=64, help="of the small models")
    parser.add_argument("--layers", type=int, default=4, help="of the small models")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3", help="a small one, with random weights")
    parser.add_argument("--folder", type=Path, help="train the model of this folder (config.json, *.safetensors)")
    parser.add_argument("--dp-replicate", type=int, default=1, help="copies of the model, for different data")
    parser.add_argument("--dp-shard", type=int, default=-1, help="ranks that share parameters; -1: all that are left")
    parser.add_argument("--cp", type=int, default=1, help="ranks that share a sequence")
    parser.add_argument("--tp", type=int, help="ranks that share every layer; None: 2 if their number is even")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts, among those of the others")
    parser.add_argument("--device", choices=sorted(BACKENDS), default="cpu")
    parser.add_argument("--backend", help="of torch.distributed; None: the device's usual one, e.g. nccl for cuda")
    parser.add_argument("--save-every", type=int, default=50, help="steps between checkpoints; the last step makes one")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out")
    parser.add_argument("--tolerance", type=float, default=1e-4, help=TOLERANCE_HELP)
    parser.add_argument("--no-check", action="store_true", help="do not compare with a run on one rank")
    parser.add_argument("--collective-timeout", type=float, default=300.0, help="seconds until a stuck rank gives up")
    args = parser.parse_args()
    for name in ("steps", "batch_size", "layers", "save_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.hidden_size % 16:  # heads of an even size each, and an MLP twice as wide
        parser.error(f"--hidden-size must be a multiple of 16, got {args.hidden_size}")
    return args


def pick_device(kind: str) -> torch.device:
    """This rank's device, made the current one."""
    if kind == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(kind)  # torch_npu, if installed, is loaded by `import torch` itself
    if not module.is_available():
        raise SystemExit(f"--device {kind}: torch {torch.__version__} finds no such device on this machine")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    module.set_device(local_rank)
    return torch.device(kind, local_rank)


def run(args: argparse.Namespace, rank: int, world_size: int, device: torch.device) -> int:
    """The run proper, on every rank."""
    batches = TextBatches(args.text, batch_size=args.batch_size, length=args.length, seed=args.seed)
    setup = OneRank(device) if world_size == 1 else ManyRanks(device, args, world_size)
    title = setup.title

    training = Training.start(args, setup.build_model(args))
    checkpoints = args.out / "checkpoints"
    if args.resume:
        training.load(checkpoints)
    resumed = bool(training.records)
    training.train(args.steps, batches, setup, title, checkpoints, args.save_every, shown=rank == 0)

    pretended = is_pretended(world_size)
    if not pretended:
        training.export(args.out / "model")
    comparison = None
    if not args.no_check and (world_size > 1 or resumed):
        comparison = compare(args, training.records, batches, device, rank, world_size)
    if rank == 0 and not pretended:
        write_results(args, title, world_size, training.records, comparison)
        print(f"next: --resume --steps {2 * args.steps} goes on, --model {others(args.model)} trains another;")
        print("a model of your own, from a folder to a folder: docs/train-a-model.md")
    return 0 if comparison is None or comparison.equal else 1


def others(model: str) -> str:
    """Another family than this."""
    return "qwen3_5" if model != "qwen3_5" else "deepseek_v32"


def is_pretended(world_size: int) -> bool:
    """Whether this is `hyper-parallel explain`: nothing is sent, so the losses mean nothing."""
    return world_size > 1 and dist.get_backend() == "fake"


class OneRank:
    """Plain PyTorch: what the reference run, and a run without torchrun, use."""

    title = "one rank"

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def build_model(self, args: argparse.Namespace) -> torch.nn.Module:
        """The model as `transformers` makes it."""
        if args.folder is not None:
            model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
        else:
            torch.manual_seed(args.seed)
            model = transformers.AutoModelForCausalLM.from_config(config_of(args))
        return model.to(self.device).train()

    def batch(self, batches: TextBatches, step: int) -> torch.Tensor:
        """All rows of a step."""
        return batches.rows(step).to(self.device)

    def mean(self, loss: torch.Tensor) -> float:
        """The loss of a step."""
        return loss.item()

    def trace(self) -> AbstractContextManager[Any]:
        """Nothing communicates."""
        return contextlib.nullcontext()


class ManyRanks:
    """The same over all axes of the mesh, in one call; each data rank has its own rows."""

    def __init__(self, device: torch.device, args: argparse.Namespace, world_size: int) -> None:
        from hyper_parallel import ParallelDims

        self.device = device
        tp = args.tp or (2 if world_size % 2 == 0 else 1)
        degrees = {"dp_replicate": args.dp_replicate, "dp_shard": args.dp_shard, "cp": args.cp, "tp": tp, "ep": args.ep}
        try:
            self.dims = ParallelDims(**degrees, world_size=world_size)
        except ValueError as error:
            raise SystemExit(str(error)) from None
        self.title = " x ".join(
            f"{name}={getattr(self.dims, name)}" for name in degrees if getattr(self.dims, name) > 1
        )
        self.data = self.dims.get_mesh("batch")

    def build_model(self, args: argparse.Namespace) -> torch.nn.Module:
        """The same values as on one rank; no rank holds more than its part of them."""
        from hyper_parallel import load_pretrained

        if args.folder is not None:
            return load_pretrained(args.folder, self.dims, dtype=torch.float32).train()
        torch.manual_seed(args.seed)
        return load_pretrained(config_of(args), self.dims).train()

    def batch(self, batches: TextBatches, step: int) -> torch.Tensor:
        """The rows of this data rank."""
        return batches.rows(step, self.data.get_local_rank(), self.data.size()).to(self.device)

    def mean(self, loss: torch.Tensor) -> float:
        """The mean over data ranks, which is the loss of one rank with all rows."""
        from hyper_parallel import DTensor, all_reduce

        mine = loss.full_tensor() if isinstance(loss, DTensor) else loss
        return all_reduce(mine.detach(), self.data).item() / self.data.size()

    def trace(self) -> AbstractContextManager[Any]:
        """Counts the collectives of one step."""
        from hyper_parallel import CommTrace

        return CommTrace()


def config_of(args: argparse.Namespace) -> Any:
    """The configuration of a small model."""
    return small_config(
        args.model, vocabulary=VOCAB_SIZE, hidden=args.hidden_size, layers=args.layers, length=args.length
    )


@dataclass
class Training:
    """Model, optimizer and the record of the steps taken: what a checkpoint holds."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    records: list[StepRecord] = field(default_factory=list)

    @classmethod
    def start(cls, args: argparse.Namespace, model: torch.nn.Module) -> Training:
        """Before the first step."""
        return cls(model, torch.optim.AdamW(model.parameters(), lr=args.lr))

    def train(
        self,
        steps: int,
        batches: TextBatches,
        setup: OneRank | ManyRanks,
        title: str,
        checkpoints: Path | None,
        save_every: int,
        *,
        shown: bool,
    ) -> None:
        """Go on until ``steps`` steps have been taken in all, saving on the way."""
        bar = ProgressBar(title, len(self.records), steps, shown=shown)
        for step in range(len(self.records), steps):
            start = time.perf_counter()
            batch = setup.batch(batches, step)
            with setup.trace() as trace:
                loss = self.step(batch)
            loss = setup.mean(loss)
            seconds = time.perf_counter() - start
            record = StepRecord(
                step=step,
                loss=loss,
                tokens_per_second=batches.batch_size * batches.length / seconds,
                collectives=len(trace.events) if trace else 0,
                collective_bytes=trace.nbytes if trace else 0,
            )
            self.records.append(record)
            bar.show(record)
            if checkpoints is not None and (len(self.records) % save_every == 0 or len(self.records) == steps):
                self.save(checkpoints)
        bar.close()

    def step(self, batch: torch.Tensor) -> torch.Tensor:
        """One optimizer step on next-byte prediction; the loss is that of this rank's rows."""
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def state_dict(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint: each rank writes its shards, and any mesh can read them."""
        model, optimizer = checkpoint.get_state_dict(self.model, self.optimizer)
        # As one string: the checkpoint would take a list apart and expect as many entries when it is read.
        records = json.dumps([asdict(record) for record in self.records])
        return {"model": model, "optimizer": optimizer, "records": records}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        checkpoint.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.records = [StepRecord(**record) for record in json.loads(state["records"])]

    def save(self, folder: Path) -> None:
        """Write ``folder/step-N``."""
        checkpoint.save({"training": self}, checkpoint_id=folder / f"step-{len(self.records)}")

    def export(self, folder: Path) -> None:
        """Write the model as `transformers` reads it; all ranks call it."""
        self.model.save_pretrained(folder)

    def load(self, folder: Path) -> None:
        """Read the newest checkpoint of ``folder``."""
        saved = sorted(folder.glob("step-*/.metadata"), key=lambda path: int(path.parent.name.removeprefix("step-")))
        if not saved:
            raise SystemExit(f"--resume: no checkpoint in {folder}")
        checkpoint.load({"training": self}, checkpoint_id=saved[-1].parent)


def compare(
    args: argparse.Namespace,
    records: list[StepRecord],
    batches: TextBatches,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Comparison:
    """Repeat the run from its first step on rank 0 alone; every rank gets the result."""
    box: list[Comparison | None] = [None]
    if rank == 0:
        reference = Training.start(args, OneRank(device).build_model(args))
        reference.train(len(records), batches, OneRank(device), "one rank", None, 0, shown=True)
        losses = [record.loss for record in reference.records]
        differences = torch.tensor([record.loss for record in records]) - torch.tensor(losses)
        box[0] = Comparison(losses, differences.abs().max().item(), args.tolerance)
    if world_size > 1:
        # The other ranks wait here for at most --collective-timeout.
        dist.broadcast_object_list(box, src=0, device=device)
    assert box[0] is not None
    return box[0]


def write_results(
    args: argparse.Namespace, title: str, world_size: int, records: list[StepRecord], comparison: Comparison | None
) -> None:
    """Log, plot, and the last lines on the terminal."""
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "transformers": transformers.__version__}
    run = {"mesh": title, "world_size": world_size, "settings": settings, "versions": versions}
    write_log(args.out / "log.json", run, records, comparison)
    plot_loss(args.out / "loss.png", title, records, comparison)
    print(f"loss {records[0].loss:.3f} -> {records[-1].loss:.3f} in {len(records)} steps; see {args.out}")
    if comparison is not None:
        verdict = "equal to" if comparison.equal else "DIFFERENT from"
        print(
            f"losses are {verdict} those of one rank: largest difference {comparison.max_difference:.2g}, "
            f"allowed {comparison.tolerance:.2g}"
        )


if __name__ == "__main__":
    sys.exit(main())
