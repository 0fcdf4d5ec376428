"""Jobs that have ended, as others go on from them: their answers are taken again, or become turns of conversations."""
