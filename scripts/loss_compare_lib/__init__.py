"""The parts of loss_compare.py: the trees that run, the runs, their exact values, and the report."""
