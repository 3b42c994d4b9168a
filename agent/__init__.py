"""The agent: acting, learning in imagination, the loop, checkpoints and the command line."""
