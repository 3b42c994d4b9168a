"""Compare the runs of a sweep, or of folders: `python -m launch.report sweeps/a`,
`python -m launch.report logs/* --out reports/a`.

Writes report.html, one page that holds its pictures, report.md and plots/*.png: learning curves,
scores at equal budget with intervals over seeds, references, compute, memory diagnostics, commands
and settings. Every run is shown, whatever became of it; of a sweep, all that its manifest lists.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from configs.command import command_line
from launch.document import to_html, to_markdown
from launch.folders import read_folders
from launch.runs import MANIFEST, Run, read_csv, read_manifest, read_sweep

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


def write(folders: list[Path], files: list[Path], out: Path | None, argv: list[str]) -> Path:
    """Returns where it wrote: `out`, or else the sweep. Raises ValueError where a folder or a CSV
    file cannot be read, or a package is missing."""
    match = "none"
    if len(folders) == 1 and (folders[0] / MANIFEST).exists():
        out = out or folders[0]
        match, own = read_manifest(folders[0]).get("match", match), read_sweep(folders[0])
    else:
        own = read_folders(folders)
    if not out:
        raise ValueError("a report of runs without a sweep needs --out, its own folder")
    foreign = foreign_runs(files, own)
    for package in NEEDED:
        if not importlib.util.find_spec(package):
            raise ValueError(f"{package} is not installed: pip install -e '.[launch]'")
    from launch.report_page import page

    tasks = {run.task for run in own}
    beside = [run for run in foreign if run.task in tasks]
    left_out = [run for run in foreign if run.task not in tasks]
    title, blocks = page(match, own, beside, left_out, out / "plots", argv)
    out.mkdir(parents=True, exist_ok=True)
    page, text = to_html(title, blocks), to_markdown(blocks, out)
    (out / "report.html").write_text(page)
    (out / "report.md").write_text(text)
    return out


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for a folder without sweep or run and a file that cannot be read."""
    argv = sys.argv[1:] if argv is None else argv
    parser = command_line("launch.report", __doc__)
    add = parser.add_argument
    add("folders", type=Path, nargs="+", metavar="FOLDER", help="a sweep, or runs of agent.train")
    add("--csv", type=Path, nargs="+", default=[], help="runs of other programs (launch/README.md)")
    add("--out", type=Path, help="folder of report.html, report.md and plots; else the sweep")
    args = parser.parse_args(argv)
    try:
        out = write(args.folders, args.csv, args.out, argv)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{out / 'report.html'} and {out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
