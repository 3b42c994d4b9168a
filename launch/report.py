"""Compare the runs of a sweep: `python -m launch.report sweeps/a`.

Writes report.html, one page that holds its pictures, report.md and plots/*.png: learning curves,
scores at equal budget with intervals over seeds, references, compute, memory diagnostics, commands
and settings. Every run of the sweep's manifest is shown, whatever became of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from launch.document import to_html, to_markdown
from launch.runs import Run, read_csv, read_manifest, read_sweep

NEEDED = ("matplotlib", "scipy")


def foreign_runs(files: list[Path], own: list[Run]) -> list[Run]:
    """Runs of the CSV files. ValueError where a variant has the name of one of the sweep's."""
    out = []
    for path in files:
        found = read_csv(path)
        same = {run.variant for run in found} & {run.variant for run in [*own, *out]}
        if same:
            raise ValueError(f"{path}: variant {sorted(same)[0]!r} is there already; rename it")
        out += found
    return out


def write(sweep: Path, files: list[Path], out: Path, argv: list[str]) -> None:
    """Raises ValueError where `sweep` or a CSV file cannot be read, or a package is missing."""
    manifest, own = read_manifest(sweep), read_sweep(sweep)
    foreign = foreign_runs(files, own)
    for package in NEEDED:
        if not importlib.util.find_spec(package):
            raise ValueError(f"{package} is not installed: pip install -e '.[launch]'")
    from launch.report_page import page

    tasks = {run.task for run in own}
    beside = [run for run in foreign if run.task in tasks]
    left_out = [run for run in foreign if run.task not in tasks]
    title, blocks = page(manifest, own, beside, left_out, out / "plots", argv)
    out.mkdir(parents=True, exist_ok=True)
    page, text = to_html(title, blocks), to_markdown(blocks, out)
    (out / "report.html").write_text(page)
    (out / "report.md").write_text(text)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a folder without a sweep and for a file that cannot be read."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser("launch.report", description=__doc__)
    add = parser.add_argument
    add("sweep", type=Path, metavar="SWEEP", help="folder with manifest.json")
    add("--csv", type=Path, nargs="+", default=[], help="runs of other programs (launch/README.md)")
    add("--out", type=Path, help="folder of report.html, report.md and plots; SWEEP unless given")
    args = parser.parse_args(argv)
    out = args.out or args.sweep
    try:
        write(args.sweep, args.csv, out, argv)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out / 'report.html'} and {out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
