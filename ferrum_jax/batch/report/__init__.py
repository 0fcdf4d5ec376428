"""A job as a person sees it: the bar, the record of its runs, and the page. Decides nothing."""
