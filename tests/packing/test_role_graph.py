"""What flows between the roles of a module: told by their names, or by edges; and what no step could follow."""

from __future__ import annotations

import pytest

from flowtrain_lightning.packing.role_graph import Edge, RoleError, RoleGraph, graph_of

LETTERS = {"image": ("a", "c"), "audio": ("b", "c")}


def test_an_encoder_takes_whatever_media_there_are():
    graph = graph_of(("backbone", "encoder"))
    assert (graph.producers, graph.trunk, graph.roles) == (("encoder",), "backbone", ("encoder", "backbone"))
    assert graph.producer_of("audio") == "encoder"
    assert graph.modality_of("encoder") is None


def test_encoders_that_are_called_after_modalities_take_these():
    graph = graph_of(("encoder_image", "encoder_audio", "backbone"))
    assert graph.producer_of("audio") == "encoder_audio"
    assert graph.modality_of("encoder_image") == "image"


def test_roles_of_any_name_have_edges():
    graph = graph_of("abc", LETTERS)
    assert (graph.producers, graph.trunk) == (("a", "b"), "c")
    assert [graph.producer_of(modality) for modality in LETTERS] == ["a", "b"]


def test_one_role_may_encode_several_modalities():
    graph = graph_of("ac", {"image": ("a", "c"), "audio": ("a", "c")})
    assert graph.producers == ("a",)
    assert graph.producer_of("audio") == "a"


def test_a_modality_that_no_role_encodes_is_told():
    with pytest.raises(RoleError, match="No role encodes media of the modality 'depth'; there are 'image', 'audio'"):
        graph_of("abc", LETTERS).producer_of("depth")


@pytest.mark.parametrize(
    ("roles", "edges", "words"),
    [
        ("abc", None, r"called 'a', 'b', 'c', which does not say .* edges = {'image': \('eye', 'trunk'\)}"),
        (("encoder_image", "backbone"), None, "does not say what flows"),
        (("encoder", "encoder_audio", "backbone"), None, "does not say what flows"),
        ("abcd", LETTERS, "the roles are 'a', 'b', 'c', 'd'. Give every role an edge"),
        ("abc", {"image": ("a", "b"), "audio": ("b", "c")}, "to one and the same role"),
        ("abc", {"image": ("a", "b"), "audio": ("a", "c")}, "to one and the same role"),
        (
            "abc",
            {"image": ("a", "c"), "depth": ("a", "c"), "audio": ("b", "c")},
            "each modality a role of its own",
        ),
    ],
)
def test_what_says_nothing_or_contradicts_itself_is_refused(roles, edges, words):
    with pytest.raises(RoleError, match=words):
        graph_of(roles, edges)


def test_two_roles_cannot_encode_one_modality():
    with pytest.raises(RoleError, match="Give every edge a modality of its own"):
        RoleGraph((Edge("a", "c", "image"), Edge("b", "c", "image")))
