"""The options of commands, `python -m PACKAGE.MODULE`, but for those of a run (`load.py`)."""

from __future__ import annotations

import argparse


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Names the defaults that say something: neither nothing nor 0, which the text explains."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = action.default and action.default != argparse.SUPPRESS
        return super()._get_help_string(action) if told else action.help


def command_line(name: str, about: str | None) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(name, description=about, formatter_class=Help)
