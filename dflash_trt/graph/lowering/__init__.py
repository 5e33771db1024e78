"""How each number format becomes nodes of a graph. formats/ has the numbers themselves."""
