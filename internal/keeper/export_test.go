package keeper

var Margin = margin
