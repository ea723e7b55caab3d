"""What the ranks of a ring do: who reads what (reads), when (table), and one rank's part in it (rank)."""
