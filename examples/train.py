"""Train a small Qwen3 model from `transformers`, its code unmodified, on real text and on several ranks.

    torchrun --nproc-per-node 4 examples/train.py              # dp=2 x tp=2 on the CPU
    torchrun --nproc-per-node 4 examples/train.py --resume     # go on from the last checkpoint
    python examples/train.py                                   # the same model on one rank, plain PyTorch

It ends by training the same model on the same data on one rank, without hyper_parallel, and compares the losses step by
step: data and tensor parallelism must not change what is learned. The exit code is 1 if they differ.

`--out` receives `log.json`, `loss.png` and `checkpoints/`.
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
from text_batches import VOCAB_SIZE, TextBatches

from hyper_parallel import checkpoint

HEADS = 4
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
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tp", type=int, help="ranks that share one copy of the model; None: 2 if the number is even")
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
    if world_size == 1:
        title, setup = "one rank", OneRank(device)
    else:
        setup = ManyRanks(args.device, mesh_shape(args.tp, world_size))
        title = f"dp={setup.shape[0]} x tp={setup.shape[1]}"

    training = Training.start(args, setup.place_model(build_model(args).to(device)))
    checkpoints = args.out / "checkpoints"
    if args.resume:
        training.load(checkpoints)
    resumed = bool(training.records)
    training.train(args.steps, batches, setup, title, checkpoints, args.save_every, shown=rank == 0)

    comparison = None
    if not args.no_check and (world_size > 1 or resumed):
        comparison = compare(args, training.records, batches, device, rank, world_size)
    if rank == 0 and not is_pretended(world_size):
        write_results(args, title, world_size, training.records, comparison)
    return 0 if comparison is None or comparison.equal else 1


def is_pretended(world_size: int) -> bool:
    """Whether this is `hyper-parallel explain`: nothing is sent, so the losses mean nothing."""
    return world_size > 1 and dist.get_backend() == "fake"


def mesh_shape(tp: int | None, world_size: int) -> tuple[int, int]:
    """(dp, tp) for this number of ranks."""
    if tp is None:
        tp = 2 if world_size % 2 == 0 else 1
    if world_size % tp:
        raise SystemExit(f"--tp {tp} does not divide the number of ranks, {world_size}")
    if HEADS % tp:
        raise SystemExit(f"--tp {tp} does not divide the model's {HEADS} attention heads")
    return world_size // tp, tp


def build_model(args: argparse.Namespace) -> torch.nn.Module:
    """A Qwen3 small enough for a CPU, with the same random weights on every rank."""
    torch.manual_seed(args.seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=args.hidden_size,
        intermediate_size=2 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        head_dim=args.hidden_size // HEADS,
        max_position_embeddings=args.length,
        use_cache=False,
        dtype=torch.float32,
    )
    return transformers.Qwen3ForCausalLM(config).train()


class OneRank:
    """Plain PyTorch: what the reference run, and a run without torchrun, use."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The model as it is."""
        return model

    def place_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """The whole batch."""
        return batch.to(self.device)

    def trace(self) -> AbstractContextManager[Any]:
        """Nothing communicates."""
        return contextlib.nullcontext()


class ManyRanks:
    """Model and batch as DTensors on a (dp, tp) mesh: tensor, sequence and loss parallel over tp, FSDP over dp."""

    def __init__(self, device: str, shape: tuple[int, int]) -> None:
        from hyper_parallel import init_device_mesh

        self.device, self.shape = device, shape
        self.mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))

    def place_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """The same modules: every layer split over tp, parameters and optimizer spread over dp too."""
        from hyper_parallel import fully_shard, parallelize_module
        from hyper_parallel_tp.plans.decoders import qwen3_plan

        parallelize_module(model, self.mesh["tp"], qwen3_plan(sequence_parallel=True, loss_parallel=True))
        for layer in model.model.layers:
            fully_shard(layer, mesh=self.mesh["dp"])
        return fully_shard(model, mesh=self.mesh["dp"])

    def place_batch(self, batch: torch.Tensor) -> torch.Tensor:
        """The global batch, of which each data-parallel rank holds its rows."""
        from hyper_parallel import Replicate, Shard, distribute_tensor

        # Every rank has made the same batch, so each takes its part and nothing is sent.
        return distribute_tensor(batch.to(self.device), self.mesh, (Shard(0), Replicate()), src_data_rank=None)

    def trace(self) -> AbstractContextManager[Any]:
        """Counts the collectives of one step."""
        from hyper_parallel import CommTrace

        return CommTrace()


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
            batch = setup.place_batch(batches[step])
            with setup.trace() as trace:
                loss = self.step(batch)
            seconds = time.perf_counter() - start
            record = StepRecord(
                step=step,
                loss=loss,
                tokens_per_second=batch.numel() / seconds,
                collectives=len(trace.events) if trace else 0,
                collective_bytes=trace.nbytes if trace else 0,
            )
            self.records.append(record)
            bar.show(record)
            if checkpoints is not None and (len(self.records) % save_every == 0 or len(self.records) == steps):
                self.save(checkpoints)
        bar.close()

    def step(self, batch: torch.Tensor) -> float:
        """One optimizer step on next-byte prediction; the loss is that of the global batch."""
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

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
        reference = Training.start(args, build_model(args).to(device))
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
