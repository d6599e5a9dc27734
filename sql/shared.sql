{{/* What all deciding functions share: those of limit.sql and that of all.sql. */}}

{{/* The algorithms by their codes, for people to read. */}}
{{define "codes"}}{{range $i, $a := .}}{{if $i}}, {{end}}{{$a.Code}} {{$a.Title}}{{end}}{{end}}

{{/* Takes what is granted, first from ordinary room, and then from granted credit. */}}
{{define "take"}}
IF s.{{.Credit}} > 0 THEN
    spent := greatest(granted * cost - (remaining - s.{{.Credit}}), 0);
    s.{{.Credit}} := s.{{.Credit}} - spent;
END IF;
units := granted * cost - spent;
{{include (print .Name ".take")}}
s.expires_at := t + {{include (print .Name ".lasts")}};
remaining := remaining - granted * cost;
{{end}}
{{/* Works out what to tell. retry_after_us is above 0 if something was denied that would fit later. */}}
{{define "tell"}}
IF retry_after_us > 0 THEN
{{include (print .Name ".retry") | indent 4}}
    retry_after_us := least(free_at, s.expires_at) - clock;
END IF;
reset_after_us := CASE
    WHEN s.{{.Credit}} > 0 THEN s.expires_at
    ELSE greatest(least(
        coalesce({{include (print .Name ".reset") | hang 8}}, clock),
        s.expires_at), clock)
END - clock;
{{end}}
