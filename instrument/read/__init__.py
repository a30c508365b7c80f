"""Read captures: trace, facts, views, simulate, advise, compare, ranks, show."""
