"""What the ranks of a ring do: who reads what (reads), when (table), one rank's part (rank), a whole call (recipe)."""
