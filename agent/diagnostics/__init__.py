"""What a trained memory holds, a file each question; `agent.diagnose` asks them."""
