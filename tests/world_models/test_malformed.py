"""World models and reflectors whose files were changed: words, no tracebacks."""

from benchmarks.faults.worlds import reflector_campaign, world_campaign


def test_every_reader_of_a_changed_world_model_succeeds_or_refuses_it_in_words(tmp_path):
    found = world_campaign(tmp_path, tries=30, seed=0)
    assert found["failures"] == [] and found["refused"] > 5 and found["read"] > 2


def test_every_reader_of_a_changed_reflector_succeeds_or_refuses_it_in_words(tmp_path):
    found = reflector_campaign(tmp_path, tries=30, seed=0)
    assert found["failures"] == [] and found["refused"] > 5 and found["read"] > 0
