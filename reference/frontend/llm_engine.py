"""Input processor, engine core and output processor in a row: text in, text out, a step at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from reference.contracts.config import EngineConfig
from reference.contracts.protocols import Checkpoint, EngineCoreClient, Tier
from reference.contracts.request import child_request_id
from reference.contracts.sampling_params import SamplingParams
from reference.frontend.async_core import make_engine_core
from reference.frontend.engine_args import EngineArgs, describe
from reference.frontend.engine_core import InprocClient, OnStep
from reference.frontend.input_processor import InputProcessor, Prompt
from reference.frontend.logger import configure_logging, logger
from reference.frontend.metrics import StatLogger
from reference.frontend.model_loader import load_model
from reference.frontend.output_processor import OutputProcessor
from reference.frontend.outputs import RequestOutput
from reference.frontend.structured_output import GrammarCompiler
from reference.frontend.tokenizer import Tokenizer, load_tokenizer


class LLMEngine:
    """The synchronous engine (vLLM's `LLMEngine`).

    Args:
        config: resolved sizes and limits.
        tier: the implementation to run.
        checkpoint: the weights.
        tokenizer: the model's tokenizer.
        on_step: see `EngineCore`.
        draft_checkpoint: the weights of the draft model, where the config has one.

    Attributes:
        metrics: what the engine has done so far; `metrics.snapshot()` gives the figures.
        log_stats: write them to the log every few seconds, at INFO (vLLM's name, turned round).
    """

    def __init__(
        self,
        config: EngineConfig,
        tier: Tier,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        on_step: OnStep | None = None,
        draft_checkpoint: Checkpoint | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        grammars = GrammarCompiler(config.model, tokenizer)
        self.engine_core = make_engine_core(config, tier, checkpoint, on_step, draft_checkpoint, grammars)
        self.client: EngineCoreClient = InprocClient(self.engine_core)
        self.input_processor = InputProcessor(config, tokenizer, grammars)
        self.output_processor = OutputProcessor(tokenizer)
        self.num_arrivals = 0
        self.metrics = self.engine_core.metrics
        self.log_stats = True
        self.stat_logger = StatLogger(self.metrics)

    @classmethod
    def from_engine_args(cls, args: EngineArgs, tier: Tier, on_step: OnStep | None = None) -> LLMEngine:
        """Load the model and build the engine.

        Raises:
            ValueError: the tier cannot run here, the model cannot be found or read, or the options contradict each
                other.
        """
        configure_logging()
        model = load_model(args, tier)
        tokenizer = load_tokenizer(model.path)
        engine = cls(model.config, tier, model.checkpoint, tokenizer, on_step, model.draft)
        logger.info("%s on the %s tier. %s", args.model, tier.name, describe(model.config))
        return engine

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        """Queue a request.

        Raises:
            ValueError: the prompt or a parameter is not acceptable, or the id is taken; nothing was queued.
        """
        n = sampling_params.n if isinstance(sampling_params, SamplingParams) else 1
        for sequence_id in (child_request_id(request_id, index) for index in range(n)):
            if sequence_id in self.output_processor.sequences or sequence_id in self.output_processor.states:
                raise ValueError(f"A request with the id {sequence_id!r} is already in the engine.")
        request, text = self.input_processor.process(
            request_id,
            prompt,
            sampling_params,
            arrival_number=self.num_arrivals,
            priority=priority,
            cache_salt=cache_salt,
        )
        if not self.has_unfinished_requests():
            self.stat_logger.restart()
        self.client.add_request(request)
        self.output_processor.add_request(request, text)
        self.num_arrivals += 1  # only now: a refused request must not change the seeds of those after it

    def step(self) -> list[RequestOutput]:
        """Run one engine step; returns an output for each request that got a token or ended."""
        news = self.client.get_output()
        self.output_processor.note_admitted(self.metrics.take_admitted())
        outputs, to_abort = self.output_processor.process_outputs(news)
        if to_abort:
            self.client.abort_requests(to_abort)
        self._count_finished(outputs)
        if self.log_stats:
            self.stat_logger.step()
        return outputs

    def _count_finished(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                # The sequences of one request run side by side: the longest one tells how long a token took.
                longest = max(len(completion.token_ids) for completion in output.outputs)
                metrics = replace(output.metrics, num_output_tokens=longest)
                self.metrics.request_finished(metrics, output.outputs[0].finish_reason or "")

    def abort_request(self, request_ids: str | Iterable[str]) -> list[RequestOutput]:
        """End requests now; returns their last outputs. Unknown and finished ids are ignored."""
        request_ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.client.abort_requests(self.output_processor.sequence_ids(request_ids))
        outputs = self.output_processor.abort_requests(request_ids)
        self._count_finished(outputs)
        return outputs

    def has_unfinished_requests(self) -> bool:
        return self.client.has_unfinished_requests()
