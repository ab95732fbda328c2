"""FAST as its paper and published files describe it (arXiv:2501.09747), for LeRobot to load.

Written into a tokenizer's folder as ``processing_action_tokenizer.py``, it takes the place of the
published code, which is not here: the interface is the one that LeRobot calls.
"""

import numpy as np
from scipy.fft import dct, idct
from transformers.processing_utils import ProcessorMixin


class UniversalActionProcessor(ProcessorMixin):
    attributes = ["bpe_tokenizer"]  # noqa: RUF012
    bpe_tokenizer_class = "AutoTokenizer"

    def __init__(
        self,
        bpe_tokenizer,
        scale=10,
        vocab_size=1024,
        min_token=0,
        action_dim=None,
        time_horizon=None,
    ):
        self.scale, self.vocab_size, self.min_token = scale, vocab_size, min_token
        self.action_dim, self.time_horizon = action_dim, time_horizon
        super().__init__(bpe_tokenizer)

    def __call__(self, chunks):
        spectrum = np.around(dct(np.asarray(chunks), axis=1, norm="ortho") * self.scale)
        codes = np.maximum(spectrum.reshape(len(chunks), -1) - self.min_token, 0).astype(int)
        return [self.bpe_tokenizer("".join(map(chr, row)))["input_ids"] for row in codes]

    def decode(self, ids, *, time_horizon, action_dim):
        plans = []
        for row in ids:
            codes = np.array([ord(c) for c in self.bpe_tokenizer.decode(row)]) + self.min_token
            spectrum = codes.reshape(time_horizon, action_dim) / self.scale
            plans.append(idct(spectrum, axis=0, norm="ortho"))
        return np.stack(plans)
