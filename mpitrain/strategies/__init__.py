"""What is exchanged, and when?"""
