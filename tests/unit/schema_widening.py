"""Whether all that one JSON Schema allows, another does, too: the rule by which messages may change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]


class Widening:
    """Holds a family's schema as it is against the same as it was."""

    def __init__(self, new: Schema, old: Schema) -> None:
        self._new, self._old = new.get("$defs", {}), old.get("$defs", {})
        self._compared: set[tuple[str, str]] = set()

    def problems(self, new: Schema, old: Schema, where: str = "") -> Iterator[str]:
        """What older writers may send, or older readers look for, and is refused or gone now."""
        pair = (new.get("$ref", ""), old.get("$ref", ""))
        if all(pair):
            if pair in self._compared:
                return
            self._compared.add(pair)
        new, old = _resolved(new, self._new), _resolved(old, self._old)
        where = old.get("title", where)
        if "anyOf" in old:
            for part in old["anyOf"]:
                yield from self.problems(new, part, where)
        elif "anyOf" in new:
            yield from self._nearest(new["anyOf"], old, where)
        else:
            yield from self._plain(new, old, where)

    def _nearest(self, options: list[Schema], old: Schema, where: str) -> Iterator[str]:
        """One option must do: the one of the same name, if there is one."""
        named = [o for o in options if o.get("$ref", "").endswith(f"/{old.get('title')}")]
        found = [list(self._apart().problems(option, old, where)) for option in named or options]
        if all(found):
            yield from min(found, key=len)

    def _apart(self) -> Widening:
        """What one option was compared with says nothing of the next."""
        return Widening({"$defs": self._new}, {"$defs": self._old})

    def _plain(self, new: Schema, old: Schema, where: str) -> Iterator[str]:
        kinds = (old.get("type"), new.get("type"))
        if "enum" not in old and kinds[0] != kinds[1] and kinds != ("integer", "number"):
            yield f"{where}: was {kinds[0]}, is {kinds[1]}"
            return
        if "enum" in new and not set(old.get("enum", [object()])) <= set(new["enum"]):
            yield f"{where}: values {old.get('enum', 'of all kinds')} are no longer all allowed"
        for bound, sign in (("minimum", 1), ("maximum", -1), ("maxLength", -1), ("maxItems", -1)):
            if bound in new and (bound not in old or sign * new[bound] > sign * old[bound]):
                yield f"{where}: {bound} was {old.get(bound)}, is {new[bound]}"
        if new.get("pattern", old.get("pattern")) != old.get("pattern"):
            yield f"{where}: pattern was {old.get('pattern')}, is {new['pattern']}"
        yield from self._fields(new, old, where)
        for inner in ("items", "additionalProperties"):
            if isinstance(new.get(inner), dict) and isinstance(old.get(inner), dict):
                yield from self.problems(new[inner], old[inner], f"{where}[]")
        for place, part in enumerate(old.get("prefixItems", ())):
            yield from self.problems(new["prefixItems"][place], part, f"{where}[{place}]")

    def _fields(self, new: Schema, old: Schema, where: str) -> Iterator[str]:
        for field in sorted({*new.get("required", ())} - {*old.get("required", ())}):
            yield f"{where}.{field}: new, and without a default"
        for field, part in old.get("properties", {}).items():
            if field not in new.get("properties", {}):
                yield f"{where}.{field}: taken away"
            else:
                yield from self.problems(new["properties"][field], part, f"{where}.{field}")


def _resolved(schema: Schema, definitions: Schema) -> Schema:
    if "$ref" not in schema:
        return schema
    found: Schema = definitions[schema["$ref"].rpartition("/")[2]]
    return found
