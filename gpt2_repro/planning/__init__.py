"""Estimate what a recipe means in bytes, hours and dollars."""
