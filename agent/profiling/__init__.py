"""Where the time and memory of an update go, a file each question; `agent.bench` asks them."""
