"""How tokens are weighted over the optimiser step's whole batch: the only normaliser there is.

Called by the trainer with the lengths of *all* responses of the global batch, on all ranks and in all micro-batches;
the result goes into `Batch.weights_T`. A loss never divides. Responses that train nothing keep their place in the
denominator, so rejecting data shrinks the gradient instead of inflating the rest.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


def token_weights(name: Aggregation, lengths_B: np.ndarray, max_tokens: int) -> np.ndarray:
    """Lengths of every response of the global batch -> float64 (B,): the weight of each token of that response.

    token_mean     1 / sum of all lengths      every token counts the same (DAPO, CISPO)
    sequence_mean  1 / (B * length)            every response counts the same (GRPO, GSPO, SAPO)
    sequence_sum   1 / B                       textbook REINFORCE: long responses count more
    constant       1 / (B * max_tokens)        the same without depending on the lengths' scale (Dr. GRPO)

    `lengths_B` counts sampled tokens, also of responses that a mask keeps out of the loss. `max_tokens` is the
    generation limit, a true constant. An empty response gets a finite weight that no token uses.
    """
    lengths_B = np.asarray(lengths_B, dtype=np.float64)
    num_sequences = max(len(lengths_B), 1)
    if name == "token_mean":
        return np.full(len(lengths_B), 1.0 / max(lengths_B.sum(), 1.0))
    if name == "sequence_mean":
        return 1.0 / (num_sequences * np.maximum(lengths_B, 1.0))
    if name == "sequence_sum":
        return np.full(len(lengths_B), 1.0 / num_sequences)
    if name == "constant":
        if max_tokens < 1:
            raise ValueError(f"aggregation 'constant' needs max_tokens >= 1, got {max_tokens}")
        return np.full(len(lengths_B), 1.0 / (num_sequences * max_tokens))
    raise ValueError(f"aggregation must be one of {', '.join(get_args(Aggregation))}, got {name!r}")
