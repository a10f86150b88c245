"""What an engine is: something that completes token ids and swaps in new weights while it does.

Two implementations: `local.py` (any Hugging Face model, CPU or GPU) and `vllm.py`. The rollout loop calls `generate`
many times at once; the weight follower calls the rest, one call at a time. No torch import here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from asyncrl.types import Completion, SamplingParams
from asyncrl.types import EngineDead as EngineDead
from asyncrl.weights.messages import JoinSpec, PlanSpec


class Engine(Protocol):
    """One model that serves many requests. All methods run on one asyncio loop."""

    @property
    def version(self) -> int:
        """The policy version being served; -1 before the first weights arrived."""
        ...

    @property
    def num_weight_ranks(self) -> int:
        """Ranks this engine occupies in the weight group: one per process that holds weights."""
        ...

    async def start(self) -> None:
        """Load the model's structure and be ready for weights. Raises ValueError on bad settings."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """Sample one completion. Cancelling the call aborts the request. Raises EngineDead."""
        ...

    async def join_weights(self, spec: JoinSpec) -> None:
        """Enter the weight group `spec` describes, leaving any former one. Bounded by spec.timeout_s."""
        ...

    async def receive_weights(self, plan: PlanSpec) -> list[int]:
        """Take part in one broadcast, loading buckets as they arrive; returns a checksum per bucket.

        Until `commit_weights` or `discard_weights`, no token is sampled from weights that are only partly new.
        """
        ...

    async def commit_weights(self, version: int) -> None:
        """The checksums agreed: serve the received weights as `version` from the next token on."""
        ...

    async def discard_weights(self) -> None:
        """The sync failed. Go on serving the old weights if they are intact, otherwise raise EngineDead."""
        ...

    def activity(self) -> dict[str, float]:
        """Cumulative counters: `tokens`, `requests`, `busy_s` (some request was running), `pause_s` (weights)."""
        ...

    async def close(self) -> None:
        """Abort what runs and free everything. Called once, also after EngineDead."""
        ...
