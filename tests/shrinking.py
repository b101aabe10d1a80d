"""Making a workload that fails small: fewer requests first, then simpler ones, then default options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from reference.contracts.sampling_params import SamplingParams
from reference.frontend.workload import Workload, WorkloadRequest


def shrink(workload: Workload, fails: Callable[[Workload], bool], max_checks: int = 400) -> Workload:
    """A small workload that still fails: fewer requests first, then simpler ones, then default options.

    Greedy, as in Zeller and Hildebrandt's "Simplifying and isolating failure-inducing input" (2002): the first smaller
    workload that fails takes the place of the failing one, until none does.
    """
    candidates = smaller_workloads(workload)
    for _ in range(max_checks):
        smaller = next(candidates, None)
        if smaller is None:
            break
        if fails(smaller):
            workload, candidates = smaller, smaller_workloads(smaller)
    return workload


def smaller_workloads(workload: Workload) -> Iterator[Workload]:
    """Workloads that differ from this one in one step towards nothing, largest steps first."""
    requests = workload.requests
    size = len(requests) // 2
    while size:
        for start in range(0, len(requests), size):
            yield replace(workload, requests=requests[:start] + requests[start + size :])
        size //= 2
    for index, request in enumerate(requests):
        for simpler in simpler_requests(request):
            yield replace(workload, requests=(*requests[:index], simpler, *requests[index + 1 :]))
    for name in workload.config:
        yield replace(workload, config={k: v for k, v in workload.config.items() if k != name})


def simpler_requests(request: WorkloadRequest) -> Iterator[WorkloadRequest]:
    prompt = request.prompt_token_ids or ()
    half = len(prompt) // 2
    if half:
        yield replace(request, prompt_token_ids=prompt[:half])
        yield replace(request, prompt_token_ids=prompt[half:])
        yield replace(request, prompt_token_ids=prompt[:-1])
    plain = WorkloadRequest(request.request_id)
    for name in ("abort_step", "arrival_step", "priority", "cache_salt"):
        if getattr(request, name) != getattr(plain, name):
            yield replace(request, **{name: getattr(plain, name)})
    params, defaults = request.params, SamplingParams()
    if params.max_tokens is not None and params.max_tokens > 1:
        for fewer in (params.max_tokens // 2, params.max_tokens - 1):
            yield replace(
                request, params=replace(params, max_tokens=fewer, min_tokens=min(params.min_tokens, fewer))
            )
    for each in fields(SamplingParams):
        if each.init and each.name not in ("max_tokens", "seed"):
            default = getattr(defaults, each.name)
            if getattr(params, each.name) != default:
                yield replace(request, params=replace(params, **{each.name: default}))
