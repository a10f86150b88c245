"""The receiving end inside vLLM: a worker extension that takes new weights from the trainer straight into the model.

vLLM mixes `Receiver` into its worker class (`worker_extension_cls`); the engine in `vllm.py` calls its methods with
`collective_rpc`, in every tensor-parallel worker at once. Arguments and results are text, numbers, lists and dicts,
which need no pickle. It never decides when to pause: its caller has done that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from asyncrl.generation.copies import Copies
from asyncrl.weights.messages import JoinSpec, PlanSpec
from asyncrl.weights.receiver import Receiver as WeightReceiver

if TYPE_CHECKING:
    import torch

Named = list[tuple[str, "torch.Tensor"]]

PLAIN_METHODS = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""vLLM's layer methods whose parameters stay, on a GPU, as they are in a checkpoint."""


class Receiver:
    """Methods that vLLM's worker gains. Every name starts with `asyncrl_`: vLLM refuses one that its worker has."""

    def asyncrl_join(self, spec: str) -> None:
        """Enter the weight group of a JoinSpec (JSON); this worker's rank follows its engine's first."""
        if not hasattr(self, "_asyncrl_receiver"):
            self._asyncrl_receiver = WeightReceiver()
        join = msgspec.json.decode(spec, type=JoinSpec)
        alone = self.vllm_config.parallel_config.world_size == 1  # type: ignore[attr-defined]
        self._asyncrl_receiver.join(join, self.rank, self.device, head_start=alone)  # type: ignore[attr-defined]

    def asyncrl_widen_head(self) -> int:
        """Compute logits in float32 from now on; returns how many output heads do."""
        from asyncrl.generation.vllm_logits import widen_head

        return widen_head(self.model_runner.get_model())  # type: ignore[attr-defined]

    def asyncrl_begin(self, plan: str, again: bool) -> None:
        """Begin to take part in one broadcast of a PlanSpec (JSON) and to load it, behind what is queued on the device.

        In a thread, while vLLM hands out the tokens of its last step; no other step may be begun before `asyncrl_end`.
        `again`: what an earlier broadcast brought does not serve yet, so that the old weights may be gone already.
        """
        import torch

        stopwatch, device = Stopwatch(self.device), self.device  # type: ignore[attr-defined]
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._asyncrl_touched = self.asyncrl_touched() and again
        self._asyncrl_received: Future[dict[str, Any]] = Future()

        def receive() -> None:
            try:
                with torch.cuda.stream(stream):
                    self._asyncrl_received.set_result(self._asyncrl_receive(plan, stopwatch))
            except BaseException as error:  # noqa: BLE001  the thread's edge: `asyncrl_end` raises it
                self._asyncrl_received.set_exception(error)

        threading.Thread(target=receive, daemon=True, name="asyncrl-receive").start()

    def asyncrl_end(self) -> dict[str, Any]:
        """Wait for what `asyncrl_begin` began: each bucket has its bound.

        Returns `checksums` (one per bucket), `pause_s` (since the last step ended on the device), `load_s`, and
        `loaded` (see Copies.last). Raises RuntimeError when the model has parameters that the plan does not bring, and
        WireBroken.
        """
        return self._asyncrl_received.result()

    def _asyncrl_receive(self, plan: str, pause: Stopwatch) -> dict[str, Any]:
        if getattr(self, "_asyncrl_text", None) != plan:  # the same each time, and generation stands still meanwhile
            self._asyncrl_text, self._asyncrl_plan = plan, msgspec.json.decode(plan, type=PlanSpec)
        loader = Loader(self.vllm_config, self._asyncrl_model_copies())  # type: ignore[attr-defined]

        def load(tensors: Named) -> None:
            self._asyncrl_touched = True
            loader.load(tensors)

        try:
            checksums = self._asyncrl_receiver.receive(self._asyncrl_plan, load)
        except BaseException:
            loader.abandon()
            raise
        loader.finish()
        return {
            "checksums": list(checksums),
            "pause_s": pause.seconds(),
            "load_s": loader.load_s,
            "loaded": self._asyncrl_copies.last,
        }

    def asyncrl_touched(self) -> bool:
        """True when a broadcast changed any weight since others last served, complete or not."""
        if hasattr(self, "_asyncrl_received"):
            self._asyncrl_received.exception()  # waits: it may still be loading if nobody asked for its end
        return getattr(self, "_asyncrl_touched", False)

    def _asyncrl_model_copies(self) -> Copies:
        """What was learnt about loading this model, kept from one sync to the next."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        if not hasattr(self, "_asyncrl_copies") or self._asyncrl_copies.model is not model:
            self._asyncrl_copies: Copies = Copies(model, model.load_weights)
        return self._asyncrl_copies

    def asyncrl_leave(self) -> None:
        """Leave the weight group, if in one."""
        if hasattr(self, "_asyncrl_receiver"):
            self._asyncrl_receiver.leave()


class Stopwatch:
    """Runs from when a device has done all that was queued when this was made; on a CPU, from then."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        self._began = time.monotonic()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(device))

    def seconds(self) -> float:
        """Until the device has done all that is queued now."""
        if self._event is None:
            return time.monotonic() - self._began
        import torch

        now = torch.cuda.Event(enable_timing=True)
        now.record()
        now.synchronize()
        return self._event.elapsed_time(now) / 1e3


class Loader:
    """Loads buckets of Hugging Face tensors into one vLLM model, in place, fusing and sharding as vLLM does.

    Plain layers on a GPU take them directly; from the second sync on by the copies that the first was seen to make
    (`copies.py`), if copies were all it made. Layers that vLLM repacks or quantises after loading (all linear layers
    on CPU) go through vLLM's layer-wise reload, which keeps a layer's tensors until all have come: those are copied,
    because the bucket they lie in is about to be overwritten.
    """

    def __init__(self, vllm_config: Any, copies: Copies) -> None:
        self._model: Any = copies.model
        self._copies = copies
        self._vllm_config = vllm_config
        self._started = self._direct = False
        self._loaded: set[str] = set()
        self._parameters: set[str] = set()
        self.load_s = 0.0

    def load(self, tensors: Named) -> None:
        """Load one bucket's tensors; after it returns the bucket may be overwritten (in stream order on a GPU)."""
        start = time.monotonic()
        if not self._started:
            self._start()
        if self._direct:
            self._loaded |= self._within(lambda: self._copies.load(tensors))
        else:
            kept = [(name, tensor.clone()) for name, tensor in tensors]
            self._loaded |= self._within(lambda: self._model.load_weights(kept)) or set()
        self.load_s += time.monotonic() - start

    def finish(self) -> None:
        """All buckets have come: repack what has to be, and check that no parameter kept its old value."""
        start = time.monotonic()
        if self._started and not self._direct:
            self._end_reload()
            self._within(lambda: repack_tied(self._model))
        missing = (self._parameters or self._names()) - self._loaded
        if missing and self._loaded and self._vllm_config.model_config.quantization is None:
            raise RuntimeError(f"the trainer sent no weights for {len(missing)} parameters: {sorted(missing)[:5]}")
        if self._direct:
            self._copies.finish()
        self.load_s += time.monotonic() - start

    def abandon(self) -> None:
        """No more buckets come. vLLM's reload is ended all the same: it counts what each layer got, and would take one
        of which this load brought a part for complete before the next has brought it all."""
        if self._started and not self._direct:
            self._end_reload()

    def _end_reload(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        self._within(lambda: finalize_layerwise_reload(self._model, self._vllm_config.model_config))

    def _start(self) -> None:
        """With the first bucket, not before: the next ones are on the wire meanwhile."""
        self._direct = is_plain(self._model, self._vllm_config)
        if self._direct:
            self._copies.begin()
            self._parameters = self._names()
        else:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            self._within(lambda: initialize_layerwise_reload(self._model))
        self._started = True

    def _names(self) -> set[str]:
        return {name for name, _ in self._model.named_parameters()}

    def _within(self, call: Callable[[], Any]) -> Any:
        import torch
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self._vllm_config), torch.no_grad():
            return call()


def repack_tied(model: torch.nn.Module) -> None:
    """Bring layers that share another layer's weights up to date.

    Such a layer (a tied output head) gets no tensors of its own, so vLLM's reload skips it; but on CPU it multiplies
    with a packed copy that was made from the old weights.
    """
    owners: dict[int, torch.nn.Module] = {}
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        for parameter in module.parameters(recurse=False):
            if owners.setdefault(id(parameter), module) is not module and method is not None:
                method.process_weights_after_loading(module)


def is_plain(model: torch.nn.Module, vllm_config: Any) -> bool:
    """Whether `load_weights` may be called again on this model as it is: unquantised, on a GPU, no derived weights."""
    if vllm_config.device_config.device_type != "cuda" or vllm_config.model_config.quantization is not None:
        return False
    if vllm_config.lora_config is not None:
        return False
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and type(method).__name__ not in PLAIN_METHODS:
            return False
        if "MLA" in type(module).__name__:  # keeps products of its weights
            return False
    return True
