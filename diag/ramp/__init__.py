"""Offers a server more load step by step: the ceiling that it serves inside the SLO, and what binds there."""
