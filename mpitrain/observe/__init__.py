"""What happened? Progress on the terminal."""
