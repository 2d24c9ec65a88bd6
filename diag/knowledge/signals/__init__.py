"""Signals: one PromQL expression each, and the sentence that reads it out, by what they are about."""
