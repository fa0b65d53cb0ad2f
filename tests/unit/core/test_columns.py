"""Types and transforms as text: read, written, refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidewater_core.crd.columns import (
    PRIMITIVES,
    ColumnType,
    Transform,
    parse_transform,
    parse_type,
)

types = st.recursive(
    st.sampled_from(sorted(PRIMITIVES)).map(ColumnType)
    | st.integers(1, 38).flatmap(
        lambda p: st.integers(0, p).map(lambda s: ColumnType("decimal", precision=p, scale=s))
    ),
    lambda inner: st.builds(ColumnType, st.sampled_from(["list", "map"]), inner),
    max_leaves=4,
)


@given(types)
def test_a_type_written_is_read_back(column: ColumnType) -> None:
    assert parse_type(str(column)) == column


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("decimal( 10 , 2 )", "decimal(10,2)"),
        (" map< string , list<int> > ", "map<string,list<int>>"),
    ],
)
def test_spaces_do_not_matter(text: str, canonical: str) -> None:
    assert str(parse_type(text)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "", "Int", "bigint", "decimal", "decimal(0,0)", "decimal(39,2)", "decimal(2,3)", "list<>",
        "list<int", "map<int,int>", "map<string>", "struct<a:int>", "list<" * 10 + "int" + ">" * 10,
    ],
)  # fmt: skip
def test_bad_types_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"column type|decimal has|deeper"):
        parse_type(text)


@pytest.mark.parametrize(
    ("text", "transform"),
    [
        ("hour(tw_time)", Transform("hour", "tw_time")),
        ("day( d )", Transform("day", "d")),
        ("bucket(16, id)", Transform("bucket", "id", 16)),
        ("truncate(4,name)", Transform("truncate", "name", 4)),
        ("region", Transform("identity", "region")),
    ],
)
def test_transforms(text: str, transform: Transform) -> None:
    assert parse_transform(text) == transform
    assert parse_transform(str(transform)) == transform


@pytest.mark.parametrize("text", ["", "hour()", "bucket(id)", "bucket(0,id)", "f(x)", "a.b", "1a"])
def test_bad_transforms_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"partition field|at least 1"):
        parse_transform(text)


@pytest.mark.parametrize(
    ("transform", "type_name", "fits"),
    [
        ("hour(c)", "timestamptz", True),
        ("hour(c)", "date", False),
        ("day(c)", "date", True),
        ("bucket(4,c)", "string", True),
        ("bucket(4,c)", "double", False),
        ("truncate(4,c)", "uuid", False),
        ("c", "boolean", True),
        ("c", "list", False),
        ("c", "map", False),
    ],
)
def test_transform_fits_type(transform: str, type_name: str, fits: bool) -> None:
    assert (parse_transform(transform).problem_on(type_name) is None) == fits
