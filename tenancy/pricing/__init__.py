"""Rate cards, exact charges and budgets."""
