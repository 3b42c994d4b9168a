"""Help of commands: defaults that say something are named."""

from configs.command import command_line


def test_help_names_the_defaults_that_say_something():
    parser = command_line("a.b", "What it does.")
    parser.add_argument("--slots", type=int, default=4, help="side by side")
    parser.add_argument("--most", type=int, default=0, help="0: no limit")
    parser.add_argument("--name", help="of the run")
    parser.add_argument("--fast", action="store_true", help="and wrong")
    text = parser.format_help()
    assert "side by side (default: 4)" in text
    assert text.count("default") == 1
