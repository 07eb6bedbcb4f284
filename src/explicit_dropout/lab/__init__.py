"""The laboratory: train, sweep, compare and report. Needs the extra `lab`; the library itself never imports it."""
