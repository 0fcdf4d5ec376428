"""An assistant's text taken apart by the forms of its model."""
