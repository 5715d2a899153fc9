"""What changes in a script that knows no ranks."""
