"""What a person sees of a job: the bar, the record of its runs, and the page. Decides nothing."""
