"""Memory and time of the output head's forward and backward, by what is asked of it.

    .venv/bin/python scripts/bench/chunked_head.py [--tokens 4096] [--vocabulary 151936] [--hidden 2048] [--top_k 32]

Each case runs in turn, several rounds, each in a process of its own. Peak memory is what a case takes beyond its inputs
and the head's gradient; its baseline is one [tokens, vocabulary] float32 tensor. Time is compared with the case that
asks for the sampled token's log-prob alone; medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CASES = {
    "log_prob": "log-prob of the sampled token alone",
    "top_k": "and log-probs at k ids",
    "top_k_entropy": "and log-probs at k ids, and the entropy's gradient",
    "full_kl": "and the KL over the whole vocabulary to an anchor",
    "whole_logits": "log-prob of the sampled token from whole logits, by autograd",
}
MB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--top_k", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--one", choices=CASES, help="measure this case once and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--one"]
    results: dict[str, list[dict[str, float]]] = {name: [] for name in args.cases}
    for _ in range(args.rounds):
        for name in args.cases:
            done = subprocess.run([*command, name], check=True, capture_output=True, text=True)
            results[name].append(json.loads(done.stdout))
    report(results, args)


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from verl.algorithms.kl import EXACT_KL
    from verl.engine.head import AnchorView, Head, HeadRequest, token_stats

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    hidden_NH = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight_VH = (0.02 * torch.randn(args.vocabulary, args.hidden)).requires_grad_()
    label_N = torch.randint(0, args.vocabulary, (args.tokens,))
    request = HeadRequest(label_N, 1.0, entropy_gradient=case == "top_k_entropy")
    if case.startswith("top_k"):
        request = request._replace(index_Nk=torch.randint(0, args.vocabulary, (args.tokens, args.top_k)))
    elif case == "full_kl":
        anchor_head = Head(weight_VH.detach())
        request = request._replace(anchor=AnchorView(hidden_NH.detach() + 0.1, anchor_head, EXACT_KL["full_reverse"]))

    def loss() -> torch.Tensor:
        if case == "whole_logits":
            return (hidden_NH @ weight_VH.T).log_softmax(-1).gather(-1, label_N[:, None]).sum()
        stats = token_stats(hidden_NH, Head(weight_VH), request)
        asked = [
            stats.log_prob_N,
            stats.kl_N,
            stats.log_prob_Nk,
            stats.entropy_N if request.entropy_gradient else None,
        ]
        return torch.stack([value.sum() for value in asked if value is not None]).sum()

    before = start_peak()
    started = time.perf_counter()
    loss().backward()
    seconds = time.perf_counter() - started
    head_gradient = weight_VH.numel() * 4
    return {"seconds": seconds, "extra_bytes": peak_bytes() - before - head_gradient}


def start_peak() -> int:
    """Forget the peak so far (Linux); returns the resident memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_bytes() -> int:
    """Largest resident memory since `start_peak`."""
    return _status_bytes("VmHWM")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def report(results: dict[str, list[dict[str, float]]], args: argparse.Namespace) -> None:
    whole = args.tokens * args.vocabulary * 4
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in results.items()
    }
    baseline = medians[args.cases[0]]["seconds"]
    print(
        f"{args.tokens} tokens, vocabulary {args.vocabulary}, hidden {args.hidden}, k {args.top_k}, "
        f"{args.threads} thread(s), medians of {args.rounds}; one [tokens, vocabulary] tensor: {whole / MB:.0f} MiB"
    )
    print(f"{'case':14} {'extra MiB':>9} {'of tensor':>9} {'seconds':>8} {'of first':>8}  asked for")
    for name, median in medians.items():
        extra, seconds = median["extra_bytes"], median["seconds"]
        print(
            f"{name:14} {extra / MB:9.0f} {extra / whole:9.3f} {seconds:8.1f} {seconds / baseline:8.3f}  {CASES[name]}"
        )


if __name__ == "__main__":
    main()
