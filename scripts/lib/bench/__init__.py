"""Measure this project's engine beside llama.cpp's own server (scripts/bench-peer)."""
