"""The pure decision: policy, plan, recipes, solvers."""
