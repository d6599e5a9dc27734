{{/* How rate_limit_all looks up the rows of its parts, and locks them. */}}
{{define "columns"}}{{include "row" (print . ".")}}, {{.}}.log{{end}}

{{/* All elements in the order of locking, each with its row. .Holder is -1 if the row has to be made, the transaction
that has locked it, or NULL. .And is a further condition for looking a row up, and .Lock follows it.

unnest((SELECT ...)) hides the arrays' length from the planner, which would otherwise plan anew for every call. The
LATERAL subquery, kept apart by FOR UPDATE or OFFSET 0, is one look-up by the primary key, whatever the statistics say.
*/}}
{{define "column"}}coalesce({{range .Tables}}{{.Alias}}.{{$.Column}}, {{end}}{{.Else}}){{end}}
{{define "elements"}}
OPEN elements FOR
    SELECT e.ord, e.first,
        e.durable IS NOT NULL AND octet_length(e.name) BETWEEN 1 AND 128
            AND octet_length(e.key) BETWEEN 1 AND 512,
        {{.Holder}}
{{- $tables := .Tables}}
{{- range (split (print "algorithm, tid, " (include "row" "") ", log"))}},
        {{include "column" (dict "Tables" $tables "Column" . "Else" (or (and (has (print "zero " .)) "0") "NULL"))}}
{{- end}}
    FROM (
        SELECT e.durable, e.name, e.key, e.ord, e.place, e.refused,
            lag(e.place) OVER (ORDER BY e.place, e.refused, e.ord) IS DISTINCT FROM e.place AS first
        FROM (
            SELECT e.*,
                concat(e.durable, 1512 - octet_length(e.key), e.key, e.name) COLLATE "C" AS place
            FROM unnest((SELECT durables), (SELECT names), (SELECT keys), (SELECT refused))
                WITH ORDINALITY AS e (durable, name, key, refused, ord)
        ) AS e
        ORDER BY e.place, e.refused, e.ord
    ) AS e
{{- $lock := .Lock}}{{$and := .And}}
{{- range .Tables}}
    LEFT JOIN LATERAL (
        SELECT d.ctid AS tid, d.* FROM rate_limit_{{.Name}} AS d
        WHERE e.first AND {{$and}}{{.Of "e"}} AND d.prefix = e.name AND d.key = e.key
        {{$lock}}
    ) AS {{.Alias}} ON true
{{- end}}
{{- if .Seen}}
    CROSS JOIN LATERAL (
        SELECT coalesce({{range $i, $t := .Tables}}{{if $i}},
            {{end}}(SELECT d.xmax::text::bigint FROM rate_limit_{{.Name}} AS d
                WHERE {{.Of "e"}} AND d.prefix = e.name AND d.key = e.key OFFSET 0){{end}}) AS by
        OFFSET 0
    ) AS seen
{{- end}};
{{end}}
{{define "zero algorithm"}}{{end}}
{{define "zero count"}}{{end}}
{{define "zero prev_count"}}{{end}}
{{define "zero window_start"}}{{end}}
{{define "zero credit"}}{{end}}
{{define "zero expires_at"}}{{end}}

{{define "holder"}}CASE WHEN e.first AND {{.}} IS NULL
            THEN coalesce(seen.by, CASE WHEN NOT e.refused THEN -1 END) END{{end}}

{{/* The same for both tables, or for the one that all parts are in. A standby cannot read unlogged tables. */}}
{{define "look up"}}
{{- $tid := include "column" (dict "Tables" .Tables "Column" "tid" "Else" "NULL")}}
IF locking AND skip_held THEN

{{- $holder := include "holder" $tid}}
{{include "elements" (dict "Tables" .Tables "And" ""
    "Lock" "FOR UPDATE SKIP LOCKED" "Seen" true "Holder" $holder) | indent 4}}
ELSIF locking THEN
{{- $holder = print "CASE WHEN e.first AND NOT e.refused AND " $tid " IS NULL THEN -1 END"}}
{{include "elements" (dict "Tables" .Tables "And" "NOT e.refused AND "
    "Lock" "FOR UPDATE" "Seen" false "Holder" $holder) | indent 4}}
ELSE
{{include "elements" (dict "Tables" .Tables "And" ""
    "Lock" "OFFSET 0" "Seen" false "Holder" "NULL::bigint") | indent 4}}
END IF;
{{end}}
