"""What a user asks for of a text's structure, checked when it is made. Standard library only."""
