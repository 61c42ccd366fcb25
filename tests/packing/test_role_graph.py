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


def test_a_role_behind_the_trunk_generates():
    graph = graph_of(("generator", "encoder", "backbone"))
    assert (graph.producers, graph.trunk, graph.behind) == (("encoder",), "backbone", ("generator",))
    assert graph.roles == ("encoder", "backbone", "generator")
    assert (graph.modality_of("generator"), graph.modality_of("encoder")) == ("generated", None)
    assert (graph.maker_of("generated"), graph.maker_of("image")) == ("backbone", "encoder")
    with pytest.raises(RoleError, match="No role encodes media of the modality 'generated'"):
        graph.producer_of("generated")


def test_an_edge_that_leaves_the_trunk_says_the_same():
    graph = graph_of("abcd", {**LETTERS, "picture": ("c", "d")})
    assert (graph.producers, graph.trunk, graph.behind, graph.generated) == (("a", "b"), "c", ("d",), {"picture"})


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
        ("abcd", {"image": ("a", "b"), "audio": ("b", "c"), "depth": ("c", "d")}, "to one and the same role"),
        ("abcd", {"image": ("a", "b"), "audio": ("b", "c"), "depth": ("b", "d")}, "2 of them leave 'b'. One role may"),
        ("abc", {"image": ("a", "b"), "audio": ("b", "a"), "depth": ("c", "b")}, "to one and the same role"),
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
