"""Greedy decoding, one forward pass at a time."""

from collections.abc import Sequence
from typing import Any

import torch

from aurora.errors import BadInput

NOT_PADDED = frozenset({"deepseek_v4"})  # model types whose answers change when a batch is padded: attention compresses blocks


def check_padding(model: Any, prompts: Sequence[Sequence[int]]) -> None:
    """Raises BadInput if the prompts would be padded as one batch, and padding changes the model's answers."""
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) > 1 and model.config.model_type in NOT_PADDED:
        raise BadInput(
            f"{model.config.model_type}: padding changes its answers, expected prompts of one length, or a `batch` of 1, found "
            f"{min(lengths)} to {max(lengths)} tokens"
        )


class GreedyBatch:
    """Decodes prompts greedily as one batch: each `step` is one forward pass, and adds a token to each unfinished answer.

    Prompts of different lengths are padded on the left.

    Args:
        model: a transformers causal language model.
        prompts: token ids of each prompt.
        new_tokens: number of tokens to generate, for each prompt.
        eos: the end-of-sequence token, which ends an answer; None: all answers have `new_tokens` tokens.
        pad: the token for padding.

    Attributes:
        tokens: the tokens generated so far, one list per prompt.

    Raises:
        BadInput: as in `check_padding`.
    """

    def __init__(
        self, model: Any, prompts: Sequence[Sequence[int]], new_tokens: Sequence[int], eos: int | None, pad: int
    ) -> None:
        check_padding(model, prompts)
        device = next(model.parameters()).device
        longest = max(len(prompt) for prompt in prompts)
        rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
        self._model = model
        self._eos = eos
        self._left = list(new_tokens)  # of each prompt, by which it is known without the device who is finished
        self._input_BT = torch.tensor(rows, device=device)
        self._attention_BT = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
        self._past: Any = None
        self._padded = len({len(prompt) for prompt in prompts}) > 1
        self.tokens: list[list[int]] = [[] for _ in prompts]

    @property
    def done(self) -> bool:
        """True if all prompts are finished."""
        return not any(map(self.running, range(len(self._left))))

    def running(self, row: int) -> bool:
        """Returns True if the prompt with index `row` is unfinished."""
        return self._left[row] > 0

    @property
    def next_tokens(self) -> int:
        """Number of input tokens of the next forward pass, padding included."""
        return self._input_BT.numel()

    @property
    def mask_BT(self) -> torch.Tensor | None:
        """(batch, tokens of the next pass) bool: False for padding and finished prompts, which need no experts.

        None means that all tokens need experts.
        """
        running = [self.running(row) for row in range(len(self._left))]
        padded = self._padded and self._input_BT.shape[1] > 1
        if all(running) and not padded:
            return None
        real_BT = self._attention_BT[:, -self._input_BT.shape[1] :].bool()
        return real_BT & torch.tensor(running, device=real_BT.device)[:, None]

    @torch.inference_mode()
    def step(self) -> torch.Tensor:
        """Runs one forward pass. Returns the logits (batch, vocabulary) from which the new tokens were chosen."""
        positions_BT = (self._attention_BT.cumsum(dim=1) - 1).clamp(min=0)[:, -self._input_BT.shape[1] :]
        out = self._model(
            input_ids=self._input_BT,
            attention_mask=self._attention_BT,
            position_ids=positions_BT,
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        )
        self._past = out.past_key_values
        logits_BV: torch.Tensor = out.logits[:, -1]
        chosen_B = logits_BV.argmax(dim=-1)
        chosen = chosen_B.tolist()  # the step's only wait for the device
        for row, token in enumerate(chosen):
            if self.running(row):
                self.tokens[row].append(token)
                self._left[row] = 0 if token == self._eos else self._left[row] - 1
        self._input_BT = chosen_B[:, None]
        self._attention_BT = torch.cat([self._attention_BT, torch.ones_like(chosen_B)[:, None]], dim=1)
        return logits_BV


def greedy_decode(model: Any, prompt: Sequence[int], new_tokens: int, eos: int | None) -> tuple[list[int], torch.Tensor]:
    """Decodes one prompt like `GreedyBatch`. Returns (new token ids, logits of each (tokens, vocabulary))."""
    batch = GreedyBatch(model, [prompt], [new_tokens], eos, pad=0)
    logits = []
    while not batch.done:
        logits.append(batch.step()[0])
    return batch.tokens[0], torch.stack(logits)
