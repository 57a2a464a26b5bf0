"""A reward as one writes it for verl: a plain function that returns a number."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for a reply that names a gold answer, else a little for every distinct letter, so that rewards differ."""
    if any(answer.lower() in solution_str.lower() for answer in ground_truth["target"]):
        return 1.0
    return 0.01 * len(set(solution_str))
