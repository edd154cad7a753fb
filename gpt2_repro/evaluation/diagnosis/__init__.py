"""Diagnosis of the loss difference between two models, and its likely causes."""
