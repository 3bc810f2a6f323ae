"""Command line: time every kernel against its peers, keep and compare the results."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import host_overhead, report, roofline, rows, run
from tkernels import device, registry

_EPILOG = """\
examples:
  python -m bench --kernel rope                       time one kernel, table on screen
  python -m bench --json before.json                  keep all rows, then after a change:
  python -m bench --compare before.json               what changed, and what is only noise
  python -m bench --from rows.json --save --readme    keep rows that another machine measured
  python -m bench host                                host cost of a call over the bare launch
  python -m bench model --shape qwen3-8b              whole networks: first token, tokens, roof
  python -m bench engine --scenario all               many requests, a long prompt, a shared prefix
  python -m bench moe --json moe.json                 layers of experts, beside those of others
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Time kernels against their PyTorch reference, torch.compile and peers.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--kernel", default="all", metavar="NAME", help="one kernel, or all (default)")
    add("--case", default="", metavar="SUBSTRING", help="only cases whose name contains this")
    add(
        "--providers",
        metavar="A,B",
        help="only these: tkernels, default, reference, compile, peers' names",
    )
    add("--rounds", type=rows.positive, metavar="N", help="samples of each (default 30)")
    add("--hot", action="store_true", help="reuse one set of buffers instead of a cold cache")
    add("--list", action="store_true", help="print kernels and cases, and stop")
    add("--from", dest="source", type=Path, metavar="FILE", help="take rows from FILE, not measure")
    add("--json", metavar="FILE|-", help="write the rows; - prints nothing else on stdout")
    add("--compare", type=Path, metavar="OLD.json", help="print the change since these rows")
    add("--save", action="store_true", help="put the rows into bench/results/<arch>.json")
    add(
        "--readme",
        action="store_true",
        help="make README's table from bench/results (alone: measures nothing)",
    )
    add("--plot", type=Path, metavar="FILE.png", help="draw each case's share of the roof")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a kernel of ours was wrong or failed, 2 cannot be done, 130, 141."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if given[:1] == ["host"]:
            return host_overhead.main(given[1:])
        if given[:1] in (["model"], ["engine"], ["moe"]):
            return _whole_networks(given[0])(given[1:])
        if given and not given[0].startswith("-"):
            raise rows.UsageError(
                "bench: expected host, model, engine, moe or options (see --help), got "
                f"{given[0]!r}"
            )
        return _bench(_parser().parse_args(given))
    except (rows.UsageError, device.UnsupportedError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bench: interrupted; nothing was kept", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit; give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _whole_networks(name: str) -> Callable[[Sequence[str]], int]:
    """These need the runner, which no other command does."""
    from bench.model import command, engine_command, moe_command

    return {"model": command.main, "engine": engine_command.main, "moe": moe_command.main}[name]


def _bench(args: argparse.Namespace) -> int:
    if args.list:
        _print_cases()
        return 0
    # Whatever can be refused is refused before minutes are spent on measuring.
    old = rows.load(args.compare) if args.compare else None
    if args.plot:
        report.check_plot()
        rows.check_writable(args.plot)
    if args.json and args.json != "-":
        rows.check_writable(Path(args.json))
    if args.readme and not (args.save or args.source or args.json or args.compare or args.plot):
        report.update_readme()
        return 0
    document, failures = _document(args)
    screen = sys.stderr if args.json == "-" else sys.stdout
    report.print_rows(document.rows, screen)
    if old is not None:
        report.print_comparison(old.rows, document.rows, screen)
    if args.json == "-":
        sys.stdout.write(rows.dumps(document))
    elif args.json:
        rows.write_text(Path(args.json), rows.dumps(document))
    if args.save:
        for path in rows.save(document):
            print(f"bench: saved {path}", file=screen)
    if args.readme:
        report.update_readme()
    if args.plot:
        report.plot(document, args.plot)
    for failure in failures:
        print(f"bench: WRONG OR FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def _document(args: argparse.Namespace) -> tuple[rows.Document, list[str]]:
    """Rows to report, from a file or measured now, and the failures of our own kernels."""
    wanted = args.providers.split(",") if args.providers is not None else None
    if args.source:
        return _stored(args, wanted), []
    if args.save:
        rows.check_savable([device.current().arch])
    chosen = run.select(args.kernel, args.case)
    run.check_providers(wanted, chosen)
    outcome = run.measure(
        chosen,
        wanted=wanted,
        rounds=args.rounds or 30,
        hot=args.hot,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    return rows.Document(roofline.measured().as_dict(), outcome.rows), outcome.failures


def _stored(args: argparse.Namespace, wanted: Sequence[str] | None) -> rows.Document:
    """The chosen rows of the file of --from."""
    if args.rounds is not None or args.hot:
        raise rows.UsageError("bench: --from must stand without --rounds and --hot, got both kinds")
    document = rows.load(args.source)
    chosen = [
        row
        for row in document.rows
        if args.kernel in ("all", row.kernel)
        and args.case in row.case
        and (wanted is None or row.provider in wanted)
    ]
    if not chosen:
        raise rows.UsageError(f"bench: {args.source} must hold a row that was asked for, got none")
    return rows.Document(document.roof, chosen)


def _print_cases() -> None:
    for name, spec in registry.all_kernels().items():
        print(name)
        for case in spec.cases:
            print(f"  {case.name:28} {' '.join(sorted(case.tags))}")


if __name__ == "__main__":
    sys.exit(main())
