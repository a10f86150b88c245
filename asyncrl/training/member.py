"""What every trainer rank holds and does: policy, optimiser, weight sender, checkpoints; and the commands it obeys.

Rank 0 gives each command to all ranks, itself included (director.py), so no rank enters a collective that another does
not. A member knows nothing of the replay buffer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from asyncrl.chat import Chat
from asyncrl.metrics import write_progress
from asyncrl.models import load_tokenizer
from asyncrl.reference.client import ReferenceClient
from asyncrl.reference.directory import Directory
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.keys import load_keys
from asyncrl.settings import Run, num_references
from asyncrl.training.batch import Sequences
from asyncrl.training.checkpoint import Checkpointer, Position
from asyncrl.training.export import export, export_adapter
from asyncrl.training.model import load_policy, num_parameters, published
from asyncrl.training.packing_check import check_packing
from asyncrl.training.ranks import Ranks, make_mesh
from asyncrl.training.reference import initial_model, make_reference, make_remote_reference
from asyncrl.training.sft import WARMUP_BATCH, Demonstrations, train_on_demonstrations, warm_up_rate
from asyncrl.training.step import Learner, Reference
from asyncrl.weights.sender import WeightSender

log = logging.getLogger(__name__)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train on the batch that follows; the weights are then version `step`."""

    step: int


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Bring every generator that is behind to `version`."""

    version: int


class Save(msgspec.Struct, frozen=True, tag=True):
    """Begin a checkpoint."""

    step: int


class Export(msgspec.Struct, frozen=True, tag=True):
    """Write the model as a Hugging Face folder, and adapters as peft's."""


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do yet: keeps the ranks' wait for the next command within its bound."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The end: finish what is being written and leave."""


Command = Train | Publish | Save | Export | Wait | Stop


def _in_words(command: Command) -> str:
    match command:
        case Train(step=step):
            return f"trains step {step}"
        case Publish(version=version):
            return f"publishes version {version}"
        case Save(step=step):
            return f"saves step {step}"
        case Export():
            return "writes the model"
        case Wait():
            return "keeps in touch with the other ranks"
        case Stop():
            return "ends"


class Member:
    """One rank of a run. Construction is collective: it loads, warms up or resumes, and makes ready to publish.

    `connect` reaches the replay server, by way of which reference processes are found; needed when there are some.
    `does` is told what this rank does, as often as it gets on.
    """

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        *,
        connect: Callable[[], ReplayClient] | None = None,
        does: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.run, self.ranks, self.does = run, ranks, does
        does("loads its model")
        config = run.config
        self.tokenizer = load_tokenizer(config.model.path)
        if config.model.chat_template is not None:
            self.tokenizer.chat_template = config.model.chat_template
        self._mesh = make_mesh(config.parallelism, ranks)
        self.policy = load_policy(config, ranks, self._mesh)
        check_packing(self.policy, ranks, dtype=DTYPES[config.training.dtype])
        self.num_parameters = num_parameters(self.policy)
        self.checkpoints = Checkpointer(run.dir / "checkpoints", config=config.checkpoint, ranks=ranks)
        self.warm_up: dict[str, float] = {}
        """What the warm-up did, if there was one: sft/steps, sft/loss."""
        newest = self.checkpoints.newest()
        if newest is None:
            self._warm_up()
        self.references = self._ask_for_references(connect)
        self.learner = Learner(
            policy=self.policy, algo=run.algo, config=config, ranks=ranks, reference=self._reference()
        )
        self.start = Position(step=0, version=0)
        if newest is not None:
            self.start = self.checkpoints.load(newest, self.policy, self.learner.optimizer)
        self.sender = WeightSender(
            tensors=self._tensors,
            rank=ranks.rank,
            config=config.weights,
            device=ranks.device,
            curve=load_keys(config.replay.keys, "server") if ranks.is_first else None,
        )

    def follow(self) -> None:
        """Ranks above 0. Consumes commands; waits for rank 0, bounded by the control group's timeout; unblocked by the
        next command or by the loss of rank 0, which raises; produces what the commands ask for. Ends with Stop."""
        while True:
            self.does("waits for the next order of rank 0")
            command = msgspec.json.decode(self.ranks.broadcast(None), type=Command)
            payload = self.ranks.broadcast(None) if isinstance(command, Train) else b""
            self.obey(command, payload)
            if isinstance(command, Stop):
                return

    def order(self, command: Command, payload: bytes = b"") -> Any:
        """Rank 0: all ranks do this now. Returns what it gave here."""
        self.does(_in_words(command))
        self.ranks.broadcast(msgspec.json.encode(command))
        if isinstance(command, Train):
            self.ranks.broadcast(payload)
        return self.obey(command, payload)

    def obey(self, command: Command, payload: bytes) -> Any:
        """Do it; collective. Train gives metrics, Publish a SyncReport, the others nothing."""
        self.does(_in_words(command))
        match command:
            case Train(step=step):
                row = self.learner.train(Sequences.decode(payload), step=step)
                return row | (self.references.figures() if self.references is not None else {})
            case Publish(version=version):
                return self.sender.publish(version)
            case Save(step=step):
                position = Position(step=step, version=step)
                self.checkpoints.save(self.policy, self.learner.optimizer, position)
            case Export():
                self._export(self.run.dir / "model")
                self._export_adapter()
            case Stop():
                self.checkpoints.close()
                self.sender.close()
                if self.references is not None:
                    self.references.close()
            case Wait():
                pass
        return None

    def _tensors(self) -> Any:
        return published(self.policy, self.published_dtype)

    @property
    def published_dtype(self) -> torch.dtype:
        """What generators receive: their own type, so that half the bytes travel where that is bf16."""
        name = self.run.config.generation.dtype
        if name == "auto":
            name = "bfloat16" if self.ranks.device.type == "cuda" else "float32"
        return DTYPES[name]

    def _export(self, folder: Path) -> None:
        config = self.run.config
        dtype = DTYPES[config.training.dtype]
        export(self.policy, folder, path=config.model.path, tokenizer=self.tokenizer, dtype=dtype, ranks=self.ranks)

    def _export_adapter(self) -> None:
        config = self.run.config
        if config.training.lora.rank:
            folder, lora = self.run.dir / "adapter", config.training.lora
            export_adapter(self.policy, folder, path=config.model.path, config=lora, ranks=self.ranks)

    def _warm_up(self) -> None:
        config = self.run.config
        steps = config.training.warmup_sft_steps or 0
        if not steps:
            return
        rate = warm_up_rate(config.model.path, config.training)
        chat = Chat.of(config, self.tokenizer)
        done, loss = train_on_demonstrations(
            self.policy,
            demonstrations=Demonstrations(self.run.env, chat, longest=config.training.seq_len),
            config=config.training,
            ranks=self.ranks,
            steps=steps,
            batch_size=WARMUP_BATCH,
            rate=lambda step: rate,
            on_step=lambda step, loss: self._say(f"warm-up on demonstrations: step {step} of {steps}, loss {loss:.3f}"),
        )
        self.warm_up = {"sft/steps": float(done), "sft/loss": loss}
        if self.run.algo.needs().reference:  # a resumed run must find the same reference again
            self._export(self.run.dir / "initial")

    def _say(self, text: str) -> None:
        self.does("warms up")
        if self.ranks.is_first:
            log.info(text)
            write_progress(self.run.dir, text)

    def _ask_for_references(self, connect: Callable[[], ReplayClient] | None) -> ReferenceClient | None:
        """The way to the reference processes, which begin to load; None when there are none."""
        config = self.run.config
        if not num_references(self.run):
            return None
        if connect is None:
            raise ValueError("services.ref_model.num_replicas needs a replay server, which knows where they are")
        client = ReferenceClient(
            model=initial_model(self.run),
            rank=self.ranks.rank,
            num_replicas=config.services.ref_model.num_replicas,
            directory=Directory(connect()),
            limit_s=max(config.supervise.stall_limit_s, config.supervise.start_timeout_s),
            curve=load_keys(config.replay.keys, "client"),
        )
        client.start()
        return client

    def _reference(self) -> Reference | None:
        temperature = self.run.algo.temperature
        if not self.run.algo.needs().reference:
            return None
        if self.references is not None:
            return make_remote_reference(self.references, self.ranks, temperature=temperature)
        initial = initial_model(self.run)
        return make_reference(
            self.run.config, self.policy, self.ranks, self._mesh, initial=initial, temperature=temperature
        )
